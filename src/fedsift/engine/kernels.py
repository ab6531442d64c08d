"""GPU kernels in Triton; imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def adam_kernel(
    w, m, v, gradient, numbers, lr, beta1, rest1, beta2, rest2, eps, BLOCK: tl.constexpr
):
    """Equations (4), (5) and (3) of the paper for one block of coordinates, in place.

    ``rest1`` and ``rest2`` are 1 - beta1 and 1 - beta2, of which float32 would lose five digits.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    g = tl.load(gradient + at, mask=inside)
    first = beta1 * tl.load(m + at, mask=inside) + rest1 * g
    second = beta2 * tl.load(v + at, mask=inside) + rest2 * g * g
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    step = lr * tl.div_rn(first, tl.sqrt_rn(second + eps))
    tl.store(w + at, tl.load(w + at, mask=inside) - step, mask=inside)
