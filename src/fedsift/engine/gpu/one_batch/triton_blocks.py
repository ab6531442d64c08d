"""GPU kernels for blocks of Transformers. Import this module only where Triton is installed.

Activations are ``(client, row, column)``, or ``(sample, token, 3, head, lane)`` for queries, keys
and values.
"""

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    x, w, bias, other, y, extra, rows, inputs, outputs, w_client, w_output, w_input, bias_client,
    EVEN: tl.constexpr, BIAS: tl.constexpr, AFTER: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows times a client's matrix, plus its bias, and what AFTER names in the same pass.

    "add" adds ``other``. "gelu" applies GELU and writes its derivative to ``extra``. "times"
    multiplies by ``other`` and writes the sums over the rows of each block to ``extra``. EVEN means
    that DEPTH divides the number of inputs.
    """
    client = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(outputs, OUTPUTS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    output = (tl.program_id(0) % across) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = row < rows
    is_output = output < outputs
    x += client * rows * inputs
    w += client * w_client
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, DEPTH):
        column = start + tl.arange(0, DEPTH)
        left, right = is_row[:, None], is_output[None, :]
        if not EVEN:
            left = left & (column < inputs)[None, :]
            right = right & (column < inputs)[:, None]
        a = tl.load(x + row[:, None] * inputs + column[None, :], mask=left, other=0.0)
        at = output[None, :] * w_output + column[:, None] * w_input
        b = tl.load(w + at, mask=right, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIAS:
        own = tl.load(bias + client * bias_client + output, mask=is_output, other=0.0)
        total += own.to(tl.float32)[None, :]
    place = client * rows * outputs + row[:, None] * outputs + output[None, :]
    inside = is_row[:, None] & is_output[None, :]
    if AFTER == "add":
        total += tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
    if AFTER == "times":
        total *= tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
        blocks = tl.num_programs(0) // across
        at = (client * blocks + tl.program_id(0) // across) * outputs + output
        tl.store(extra + at, tl.sum(total, 0), mask=is_output)
    if AFTER == "gelu":
        share = 0.5 + 0.5 * tl.erf(total * 0.7071067811865476)
        density = 0.3989422804014327 * tl.exp(-0.5 * total * total)
        slope = share + total * density
        tl.store(extra + place, slope.to(extra.dtype.element_ty), mask=inside)
        total *= share
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def attention_weights(q, k, row, key, tokens, scale, CAUSAL: tl.constexpr):
    """The softmax of q kᵀ · scale for some rows of one head, over all keys."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (key < tokens)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= row[:, None])
    score = tl.where(seen, score, -float("inf"))
    share = tl.exp(score - tl.max(score, 1)[:, None])
    return share / tl.sum(share, 1)[:, None]


@triton.jit
def attention_kernel(
    qkv, y, tokens, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The attention of one head of one sample, whose keys all fit into a block."""
    sample = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    lane = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    qkv += sample * tokens * 3 * HEADS * WIDTH + head * WIDTH
    y += sample * tokens * HEADS * WIDTH + head * WIDTH
    at_keys = key[:, None] * (3 * HEADS * WIDTH) + lane[None, :]
    is_key = (key < tokens)[:, None]
    k = tl.load(qkv + HEADS * WIDTH + at_keys, mask=is_key, other=0.0)
    v = tl.load(qkv + 2 * HEADS * WIDTH + at_keys, mask=is_key, other=0.0)
    for start in range(0, tokens, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = (row < tokens)[:, None]
        at = row[:, None] * (3 * HEADS * WIDTH) + lane[None, :]
        q = tl.load(qkv + at, mask=is_row, other=0.0)
        share = attention_weights(q, k, row, key, tokens, scale, CAUSAL)
        mixed = tl.dot(share.to(v.dtype), v, input_precision="ieee")
        at_out = row[:, None] * (HEADS * WIDTH) + lane[None, :]
        tl.store(y + at_out, mixed.to(y.dtype.element_ty), mask=is_row)


@triton.jit
def attention_gradient_kernel(
    qkv, gradient, result, sums, tokens, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of one head's queries, keys and values, and their sums over the tokens.

    The attention weights are computed again, which is faster than reading them.
    """
    sample = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    lane = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    qkv += sample * tokens * 3 * HEADS * WIDTH + head * WIDTH
    result += sample * tokens * 3 * HEADS * WIDTH + head * WIDTH
    gradient += sample * tokens * HEADS * WIDTH + head * WIDTH
    at_keys = key[:, None] * (3 * HEADS * WIDTH) + lane[None, :]
    is_key = (key < tokens)[:, None]
    k = tl.load(qkv + HEADS * WIDTH + at_keys, mask=is_key, other=0.0)
    v = tl.load(qkv + 2 * HEADS * WIDTH + at_keys, mask=is_key, other=0.0)
    of_k = tl.zeros((KEYS, WIDTH), tl.float32)
    of_v = tl.zeros((KEYS, WIDTH), tl.float32)
    sum_q = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, tokens, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = (row < tokens)[:, None]
        at = row[:, None] * (3 * HEADS * WIDTH) + lane[None, :]
        q = tl.load(qkv + at, mask=is_row, other=0.0)
        at_out = row[:, None] * (HEADS * WIDTH) + lane[None, :]
        g = tl.load(gradient + at_out, mask=is_row, other=0.0)
        share = attention_weights(q, k, row, key, tokens, scale, CAUSAL)
        of_v += tl.dot(tl.trans(share.to(g.dtype)), g, input_precision="ieee")
        of_share = tl.dot(g, tl.trans(v), input_precision="ieee")
        of_score = share * (of_share - tl.sum(share * of_share, 1)[:, None]) * scale
        of_score = of_score.to(q.dtype)
        of_q = tl.dot(of_score, k, input_precision="ieee")
        of_k += tl.dot(tl.trans(of_score), q, input_precision="ieee")
        sum_q += tl.sum(of_q, 0)
        tl.store(result + at, of_q.to(result.dtype.element_ty), mask=is_row)
    place = result + HEADS * WIDTH + at_keys
    tl.store(place, of_k.to(result.dtype.element_ty), mask=is_key)
    tl.store(place + HEADS * WIDTH, of_v.to(result.dtype.element_ty), mask=is_key)
    sums += sample * 3 * HEADS * WIDTH + head * WIDTH + lane
    tl.store(sums, sum_q)
    tl.store(sums + HEADS * WIDTH, tl.sum(of_k, 0))
    tl.store(sums + 2 * HEADS * WIDTH, tl.sum(of_v, 0))


@triton.jit
def residual_norm_gradient_kernel(
    x, gradient, skipped, weight, mean, inverse_std, result, sums,
    rows, portion, client_stride, sums_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x, used by a layer normalization and by the residual connection around it.

    ``skipped`` is the gradient of the residual connection. The sums are those of the scale's and
    the bias's gradient and of ``skipped``, over a portion of the rows.
    """
    client = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * portion
    last = tl.minimum(first + portion, rows)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    own = weight + client * client_stride + column
    scale = tl.load(own, mask=is_column, other=0.0).to(tl.float32)
    plain = tl.zeros((ROWS, BLOCK), tl.float32)
    along = tl.zeros((ROWS, BLOCK), tl.float32)
    around = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & is_column[None, :]
        place = client * rows + row
        at = place[:, None] * WIDTH + column[None, :]
        root = tl.load(inverse_std + place, mask=row < last, other=0.0)
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        unit -= tl.load(mean + place, mask=row < last, other=0.0)[:, None]
        unit = tl.where(inside, unit * root[:, None], 0.0)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(skipped + at, mask=inside, other=0.0).to(tl.float32)
        plain += g
        along += g * unit
        around += other
        g *= scale[None, :]
        tilt = tl.sum(g * unit, 1) / WIDTH
        level = tl.sum(g, 1) / WIDTH
        value = (g - unit * tilt[:, None] - level[:, None]) * root[:, None] + other
        tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)
    sums += (client * tl.num_programs(0) + tl.program_id(0)) * WIDTH + column
    tl.store(sums, tl.sum(along, 0), mask=is_column)
    tl.store(sums + sums_stride, tl.sum(plain, 0), mask=is_column)
    tl.store(sums + 2 * sums_stride, tl.sum(around, 0), mask=is_column)
