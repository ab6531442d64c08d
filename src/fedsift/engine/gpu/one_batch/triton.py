"""GPU kernels in Triton. Import this module only where Triton is installed.

Activations are ``(client, row, column)``. The second axis of each grid is the client.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x, weight, bias, y, mean, inverse_std, rows, client_stride, eps,
    WIDTH: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows: layer normalization with CENTER, RMS normalization without."""
    client = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = client * rows + row
    at = place[:, None] * WIDTH + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        center = tl.sum(value, 1) / WIDTH
        value = tl.where(inside, value - center[:, None], 0.0)
        tl.store(mean + place, center, mask=row < rows)
    root = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(inverse_std + place, root, mask=row < rows)
    value *= root[:, None]
    own = client * client_stride + column
    if WEIGHT:
        value *= tl.load(weight + own, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + own, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient_kernel(
    x, gradient, weight, mean, inverse_std, result, weight_sums, bias_sums,
    rows, portion, client_stride,
    WIDTH: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a portion of the rows and, if SUMS, the sums of weight and bias."""
    client = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * portion
    last = tl.minimum(first + portion, rows)
    column = tl.arange(0, BLOCK)
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        own = weight + client * client_stride + column
        scale = tl.load(own, mask=column < WIDTH, other=0.0).to(tl.float32)
    plain = tl.zeros((ROWS, BLOCK), tl.float32)
    along = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < WIDTH)[None, :]
        place = client * rows + row
        at = place[:, None] * WIDTH + column[None, :]
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        root = tl.load(inverse_std + place, mask=row < last, other=0.0)
        if CENTER:
            unit -= tl.load(mean + place, mask=row < last, other=0.0)[:, None]
        unit = tl.where(inside, unit * root[:, None], 0.0)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if SUMS:
            plain += g
            along += g * unit
        g *= scale[None, :]
        value = g - unit * (tl.sum(g * unit, 1) / WIDTH)[:, None]
        if CENTER:
            value -= (tl.sum(g, 1) / WIDTH)[:, None]
        value *= root[:, None]
        tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)
    if SUMS:
        sums = (client * tl.num_programs(0) + tl.program_id(0)) * WIDTH + column
        tl.store(weight_sums + sums, tl.sum(along, 0), mask=column < WIDTH)
        tl.store(bias_sums + sums, tl.sum(plain, 0), mask=column < WIDTH)


@triton.jit
def cross_entropy_kernel(
    output, labels, gradient, losses, share, rows, classes, ignored, BLOCK: tl.constexpr
):
    """Write one row's loss, and the gradient of its output times ``share`` of its client.

    They are NaN for a label that is no class.
    """
    client = tl.program_id(1).to(tl.int64)
    place = client * rows + tl.program_id(0)
    output += place * classes
    gradient += place * classes
    label = tl.load(labels + place)
    is_used = label != ignored
    is_class = (label >= 0) & (label < classes)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(output + column, mask=column < classes, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        is_set = higher > -float("inf")
        total = tl.where(is_set, total * tl.exp(top - higher) + tl.exp(x - higher), 0.0)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top > -float("inf"), total * tl.exp(top - highest), 0.0), 0)
    true = tl.load(output + label, mask=is_class, other=float("nan")).to(tl.float32)
    loss = tl.where(is_used, tl.log(total) + highest - true, 0.0)
    tl.store(losses + place, loss)
    weight = tl.where(is_class, tl.load(share + client), float("nan"))
    scale = tl.where(is_used, weight, 0.0)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(output + column, mask=column < classes, other=-float("inf")).to(tl.float32)
        slope = (tl.exp(x - highest) / total - (column == label).to(tl.float32)) * scale
        tl.store(gradient + column, slope.to(gradient.dtype.element_ty), mask=column < classes)


@triton.jit
def rotate_kernel(
    x, cos, sin, y, tokens, token_stride, shared,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the two halves of each head of one token by the token's angles, or back.

    ``shared`` is 0 if all samples have the same angles, else 1.
    """
    place = tl.program_id(0).to(tl.int64)
    angle = (place // tokens * shared * tokens + place % tokens) * 2 * HALF
    head = tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
    at = head[:, None] * 2 * HALF + half[None, :]
    first = tl.load(x + place * token_stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + place * token_stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos1 = tl.load(cos + angle + half).to(tl.float32)[None, :]
    cos2 = tl.load(cos + angle + HALF + half).to(tl.float32)[None, :]
    sin1 = tl.load(sin + angle + half).to(tl.float32)[None, :]
    sin2 = tl.load(sin + angle + HALF + half).to(tl.float32)[None, :]
    if BACKWARD:
        upper = first * cos1 + second * sin2
        lower = second * cos2 - first * sin1
    else:
        upper = first * cos1 - second * sin1
        lower = second * cos2 + first * sin2
    y += place * HEADS * 2 * HALF
    tl.store(y + at, upper.to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, lower.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate, x, y, numel, BLOCK: tl.constexpr):
    """Y = silu(gate) · x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < numel, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < numel)


@triton.jit
def gate_gradient_kernel(gate, x, gradient, of_gate, of_x, numel, BLOCK: tl.constexpr):
    """Write the gradients of silu(gate) · x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    tl.store(of_x + at, (slope * g * share).to(of_x.dtype.element_ty), mask=inside)
    own = slope * value * share * (1.0 + g * (1.0 - share))
    tl.store(of_gate + at, own.to(of_gate.dtype.element_ty), mask=inside)
