"""GPU kernels in Triton. Import this module only where Triton is installed.

Images are stored as ``(client, sample, height, width, channel)`` and weights as ``(client, output,
tap, input)``, where a tap is one position of the convolution window. The second axis of each grid
is the client, so blocks that run at the same time share a client's weights in the cache.
"""

import triton
import triton.language as tl


@triton.jit
def adam_kernel(
    w, m, v, gradient, low_precision, first, last, lr, beta1, beta2, eps,
    LOW_PRECISION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Equations (4), (5) and (3) of the paper for one block of coordinates, in place.

    ``lr``, ``beta1``, ``beta2`` and ``eps`` point to float64 numbers: in float32, 1 - beta would
    lose five digits. If LOW_PRECISION, ``low_precision`` receives the weights in the layers' number
    format. If EVEN, all coordinates are inside, and loads without a mask are wider.
    """
    at = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < last if not EVEN else tl.full((BLOCK,), True, tl.int1)
    decay1 = tl.load(beta1)
    decay2 = tl.load(beta2)
    rest1 = (1.0 - decay1).to(tl.float32)
    rest2 = (1.0 - decay2).to(tl.float32)
    g = tl.load(gradient + at, mask=inside)
    mean = decay1.to(tl.float32) * tl.load(m + at, mask=inside) + rest1 * g
    square = decay2.to(tl.float32) * tl.load(v + at, mask=inside) + rest2 * g * g
    tl.store(m + at, mean, mask=inside)
    tl.store(v + at, square, mask=inside)
    small = tl.load(eps).to(tl.float32)
    step = tl.load(lr).to(tl.float32) * tl.div_rn(mean, tl.sqrt_rn(square + small))
    new = tl.load(w + at, mask=inside) - step
    tl.store(w + at, new, mask=inside)
    if LOW_PRECISION:
        tl.store(low_precision + at, new.to(low_precision.dtype.element_ty), mask=inside)


@triton.jit
def input_pixel(
    row, column, inside, in_height, in_width, DIVISOR: tl.constexpr, PADDED: tl.constexpr
):
    """The input pixel that a tap reads, and whether it exists.

    ``row`` and ``column`` count in steps of 1 / DIVISOR pixels, so only multiples of DIVISOR are
    pixels. If not PADDED, every tap is known to be inside the image.
    """
    if DIVISOR > 1:
        inside = inside & (row % DIVISOR == 0) & (column % DIVISOR == 0)
        row = row // DIVISOR
        column = column // DIVISOR
    if PADDED:
        inside = inside & (row >= 0) & (row < in_height)
        inside = inside & (column >= 0) & (column < in_width)
    return row, column, inside


@triton.jit
def convolution_kernel(
    x, w, bias, y, rows, height, width, in_height, in_width, channels, outputs,
    x_client, w_client, bias_client, y_client,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BACKWARD: tl.constexpr,
    CHANNELS: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Convolve x with the weights; if BACKWARD, compute a convolution's gradient with respect to x.

    Each row of the product is one pixel p of y, and its tap t reads pixel (p * step + sign * t +
    shift) / divisor of x. Forward, the step is the stride; backward, the divisor is the stride, the
    taps run the other way, and the weights are transposed.

    CHANNELS = 0 means that DEPTH divides the number of channels. Otherwise it is that number.
    """
    TAPS: tl.constexpr = SIDE * SIDE
    PADDED: tl.constexpr = BACKWARD or PADDING > 0
    DIVISOR: tl.constexpr = STRIDE if BACKWARD else 1
    step: tl.constexpr = 1 if BACKWARD else STRIDE
    sign: tl.constexpr = -1 if BACKWARD else 1
    shift: tl.constexpr = PADDING if BACKWARD else -PADDING
    if BACKWARD:
        w_output = 1
        w_tap = outputs
        w_channel = TAPS * outputs
    else:
        w_output = TAPS * channels
        w_tap = channels
        w_channel = 1
    client = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(outputs, OUTPUTS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    output = (tl.program_id(0) % across) * OUTPUTS + tl.arange(0, OUTPUTS)
    pixel = row % (height * width)
    top = (pixel // width) * step + shift
    left = (pixel % width) * step + shift
    x += client * x_client
    w += client * w_client
    sample = (row // (height * width)) * (in_height * in_width)
    is_row = row < rows
    is_output = output < outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if CHANNELS == 0:
        blocks = channels // DEPTH
        for number in range(TAPS * blocks):
            tap = number // blocks
            channel = (number % blocks) * DEPTH + tl.arange(0, DEPTH)
            down, right, found = input_pixel(
                top + sign * (tap // SIDE), left + sign * (tap % SIDE), is_row,
                in_height, in_width, DIVISOR, PADDED,
            )  # fmt: skip
            place = (sample + down * in_width + right) * channels
            a = tl.load(x + place[:, None] + channel[None, :], mask=found[:, None], other=0.0)
            at = output[None, :] * w_output + tap * w_tap + channel[:, None] * w_channel
            b = tl.load(w + at, mask=is_output[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        for start in range(0, TAPS * CHANNELS, DEPTH):
            entry = start + tl.arange(0, DEPTH)
            tap = entry // CHANNELS
            channel = entry % CHANNELS
            is_entry = entry < TAPS * CHANNELS
            down, right, found = input_pixel(
                top[:, None] + sign * (tap // SIDE)[None, :],
                left[:, None] + sign * (tap % SIDE)[None, :],
                is_row[:, None] & is_entry[None, :],
                in_height, in_width, DIVISOR, PADDED,
            )  # fmt: skip
            if DIVISOR > 1:
                place = (sample[:, None] + down * in_width + right) * CHANNELS + channel[None, :]
            else:
                corner = (sample + top * in_width + left) * CHANNELS
                offset = sign * ((tap // SIDE) * in_width + tap % SIDE) * CHANNELS + channel
                place = corner[:, None] + offset[None, :]
            a = tl.load(x + place, mask=found, other=0.0)
            at = output[None, :] * w_output + (tap * w_tap + channel * w_channel)[:, None]
            b = tl.load(w + at, mask=is_output[None, :] & is_entry[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + client * bias_client + output, mask=is_output, other=0.0)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    place = client * y_client + row[:, None] * outputs + output[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def weight_gradient_kernel(
    x, gradient, result, bias_result, rows, height, width, in_height, in_width, channels, outputs,
    portion, x_client, gradient_client, result_client, result_portion, bias_client, bias_portion,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, CHANNELS: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to the weights, summed over one portion of the pixels.

    CHANNELS = 0 means that INPUTS divides the number of channels. Otherwise it is that number, and
    with BIAS the window has one more entry, which is always 1.
    """
    TAPS: tl.constexpr = SIDE * SIDE
    PADDED: tl.constexpr = PADDING > 0
    client = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * portion
    last = tl.minimum(first + portion, rows)
    across = tl.cdiv(TAPS * channels + BIAS, INPUTS)
    output = (tl.program_id(0) // across) * OUTPUTS + tl.arange(0, OUTPUTS)
    entry = (tl.program_id(0) % across) * INPUTS + tl.arange(0, INPUTS)
    if CHANNELS == 0:
        tap = ((tl.program_id(0) % across) * INPUTS) // channels
        channel = entry - tap * channels
    else:
        tap = entry // CHANNELS
        channel = entry % CHANNELS
    x += client * x_client
    gradient += client * gradient_client
    is_output = output < outputs
    is_weight = entry < TAPS * channels
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(first, last, DEPTH):
        row = start + tl.arange(0, DEPTH)
        is_row = row < last
        pixel = row % (height * width)
        sample = (row // (height * width)) * (in_height * in_width)
        top = (pixel // width) * STRIDE - PADDING
        left = (pixel % width) * STRIDE - PADDING
        g = tl.load(
            gradient + row[:, None] * outputs + output[None, :],
            mask=is_row[:, None] & is_output[None, :], other=0.0,
        )  # fmt: skip
        if CHANNELS == 0:
            down, right, found = input_pixel(
                top + tap // SIDE, left + tap % SIDE, is_row, in_height, in_width, 1, PADDED
            )
            place = (sample + down * in_width + right) * channels
            b = tl.load(x + place[:, None] + channel[None, :], mask=found[:, None], other=0.0)
        else:
            down, right, found = input_pixel(
                top[:, None] + (tap // SIDE)[None, :], left[:, None] + (tap % SIDE)[None, :],
                is_row[:, None] & is_weight[None, :], in_height, in_width, 1, PADDED,
            )  # fmt: skip
            corner = (sample + top * in_width + left) * CHANNELS
            offset = ((tap // SIDE) * in_width + tap % SIDE) * CHANNELS + channel
            b = tl.load(x + corner[:, None] + offset[None, :], mask=found, other=0.0)
            if BIAS:
                b = tl.where((entry == TAPS * CHANNELS)[None, :], 1.0, b).to(b.dtype)
        total = tl.dot(tl.trans(g), b, total, input_precision=PRECISION)
    place = output[:, None] * (TAPS * channels) + entry[None, :]
    place += client * result_client + tl.program_id(2).to(tl.int64) * result_portion
    tl.store(result + place, total, mask=is_output[:, None] & is_weight[None, :])
    if BIAS:
        place = client * bias_client + tl.program_id(2).to(tl.int64) * bias_portion
        place += output[:, None] + tl.zeros((OUTPUTS, INPUTS), tl.int64)
        is_bias = (entry == TAPS * channels)[None, :]
        tl.store(bias_result + place, total, mask=is_output[:, None] & is_bias)


@triton.jit
def pool_kernel(
    x, y, argmax, numel, width, channels, in_width, in_area, area,
    SIDE: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the maximum of each window and its tap (the first of equals); with RELU, at least 0.

    A window without a positive value has tap -1 if RELU.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    pixel = at // channels
    place = ((pixel // area) * in_area + (pixel % area // width) * SIDE * in_width) * channels
    place += (pixel % width) * SIDE * channels + at % channels
    best = tl.load(x + place, mask=inside, other=0.0)
    tap = tl.zeros((BLOCK,), tl.int8)
    for number in tl.static_range(1, SIDE * SIDE):
        step = (number // SIDE) * in_width + number % SIDE
        other = tl.load(x + place + step * channels, mask=inside, other=0.0)
        larger = other > best
        best = tl.where(larger, other, best)
        tap = tl.where(larger, number, tap).to(tl.int8)
    if RELU:
        tap = tl.where(best > 0, tap, -1).to(tl.int8)
        best = tl.maximum(best, 0.0)
    tl.store(y + at, best, mask=inside)
    tl.store(argmax + at, tap, mask=inside)


@triton.jit
def unpool_kernel(
    gradient, argmax, result, numel, width, channels, in_width, in_area, area,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each window to the pixel that was its maximum, and 0 to the others."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    pixel = at // channels
    place = ((pixel // area) * in_area + (pixel % area // width) * SIDE * in_width) * channels
    place += (pixel % width) * SIDE * channels + at % channels
    g = tl.load(gradient + at, mask=inside, other=0.0)
    tap = tl.load(argmax + at, mask=inside, other=-1)
    for number in tl.static_range(SIDE * SIDE):
        step = (number // SIDE) * in_width + number % SIDE
        tl.store(result + place + step * channels, tl.where(tap == number, g, 0.0), mask=inside)


@triton.jit
def norm_kernel(
    x, scale, bias, y, mean, inverse_std, pixels, batch, client_stride, eps,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Normalize one sample."""
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    x += sample * pixels * CHANNELS
    y += sample * pixels * CHANNELS
    first = tl.zeros((CHANNELS,), tl.float32)
    second = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=(row < pixels)[:, None], other=0.0).to(tl.float32)
        first += tl.sum(value, 0)
        second += tl.sum(value * value, 0)
    size = pixels * (CHANNELS // GROUPS)
    center = tl.sum(tl.reshape(first, (GROUPS, CHANNELS // GROUPS)), 1) / size
    square = tl.sum(tl.reshape(second, (GROUPS, CHANNELS // GROUPS)), 1) / size
    root = 1.0 / tl.sqrt_rn(tl.maximum(square - center * center, 0.0) + eps)
    group = tl.arange(0, GROUPS)
    tl.store(mean + sample * GROUPS + group, center)
    tl.store(inverse_std + sample * GROUPS + group, root)
    center = by_channel(center, CHANNELS, GROUPS)
    root = by_channel(root, CHANNELS, GROUPS)
    client = sample // batch * client_stride
    factor = root * tl.load(scale + client + channel)
    offset = tl.load(bias + client + channel) - center * factor
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=(row < pixels)[:, None], other=0.0).to(tl.float32)
        value = value * factor[None, :] + offset[None, :]
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=(row < pixels)[:, None])


@triton.jit
def by_channel(x, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat the number of each group for each of its channels."""
    wide = tl.broadcast_to(x[:, None], (GROUPS, CHANNELS // GROUPS))
    return tl.reshape(wide, (CHANNELS,))


@triton.jit
def norm_gradient_kernel(
    x, y, gradient, scale, mean, inverse_std, result, scale_sums, bias_sums,
    pixels, batch, client_stride,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write one sample's gradient, and its contributions to those of scale and bias."""
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    group = tl.arange(0, GROUPS)
    x += sample * pixels * CHANNELS
    y += sample * pixels * CHANNELS
    gradient += sample * pixels * CHANNELS
    result += sample * pixels * CHANNELS
    center = by_channel(tl.load(mean + sample * GROUPS + group), CHANNELS, GROUPS)
    root = by_channel(tl.load(inverse_std + sample * GROUPS + group), CHANNELS, GROUPS)
    weight = tl.load(scale + sample // batch * client_stride + channel)
    plain = tl.zeros((CHANNELS,), tl.float32)
    along = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None]
        at = row[:, None] * CHANNELS + channel[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, g, 0.0)
        unit = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * root[
            None, :
        ]
        plain += tl.sum(g, 0)
        along += tl.sum(g * unit, 0)
    tl.store(bias_sums + sample * CHANNELS + channel, plain)
    tl.store(scale_sums + sample * CHANNELS + channel, along)
    size = pixels * (CHANNELS // GROUPS)
    level = tl.sum(tl.reshape(plain * weight, (GROUPS, CHANNELS // GROUPS)), 1) / size
    tilt = tl.sum(tl.reshape(along * weight, (GROUPS, CHANNELS // GROUPS)), 1) / size
    level = by_channel(level, CHANNELS, GROUPS)
    tilt = by_channel(tilt, CHANNELS, GROUPS)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None]
        at = row[:, None] * CHANNELS + channel[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, g, 0.0)
        unit = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * root[
            None, :
        ]
        value = (g * weight[None, :] - level[None, :] - unit * tilt[None, :]) * root[None, :]
        tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_kernel(
    output, labels, gradient, loss, batch, classes, BATCH: tl.constexpr, CLASSES: tl.constexpr
):
    """Add one client's mean loss to ``loss``, and write the gradient of its output."""
    client = tl.program_id(0)
    sample = tl.arange(0, BATCH)
    label = tl.arange(0, CLASSES)
    at = (client * batch + sample)[:, None] * classes + label[None, :]
    inside = (sample < batch)[:, None] & (label < classes)[None, :]
    x = tl.load(output + at, mask=inside, other=-float("inf")).to(tl.float32)
    x -= tl.max(x, 1)[:, None]
    share = tl.exp(x)
    total = tl.sum(share, 1)
    true = tl.load(labels + client * batch + sample, mask=sample < batch, other=0)
    hit = label[None, :] == true[:, None]
    each = tl.log(total) - tl.sum(tl.where(hit, x, 0.0), 1)
    mean = tl.sum(tl.where(sample < batch, each, 0.0), 0) / batch
    tl.store(loss + client, tl.load(loss + client) + mean)
    slope = (share / total[:, None] - hit.to(tl.float32)) / batch
    tl.store(gradient + at, slope.to(gradient.dtype.element_ty), mask=inside)
