"""Layer and RMS normalization of rows, with parameters per client or the same for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedsift.engine.gpu.one_batch.backend import has_kernels

ELEMENTS = 2048
"""Numbers that a GPU block loads at a time."""
PORTIONS = 2000
"""Blocks that give the whole GPU work."""


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> Tensor:
    """Return rows ``(clients, ..., width)`` divided by their standard deviation.

    If ``is_centered``, their mean is subtracted first. Weight and bias are ``(clients, width)``, or
    ``(1, width)`` if they are the same for all clients.

    >>> x = torch.tensor([[[1.0, 3.0]], [[4.0, 0.0]]])
    >>> normalized(x, torch.tensor([[1.0, 1.0], [2.0, 1.0]]), None, 0.0, is_centered=True).tolist()
    [[[-1.0, 1.0]], [[2.0, -1.0]]]
    """
    if weight is not None and bias is not None and len(weight) != len(bias):
        weight, bias = weight.expand(len(x), -1), bias.expand(len(x), -1)
    if has_kernels(x):
        found: Tensor = Normalization.apply(x.contiguous(), weight, bias, eps, is_centered)  # type: ignore[no-untyped-call]
        return found
    y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    y = y - y.mean(-1, keepdim=True) if is_centered else y
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    middle = [1] * (x.dim() - 2)
    if weight is not None:
        y = y * weight.view(len(weight), *middle, -1)
    if bias is not None:
        y = y + bias.view(len(bias), *middle, -1)
    return y.to(x.dtype)


class Normalization(torch.autograd.Function):
    """The same as Triton kernels that read and write each number once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        is_centered: bool,
    ) -> Tensor:
        """Normalize each row."""
        weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
        y, mean, inverse_std = normalize(x, weight, bias, eps, is_centered)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.is_centered, ctx.has_bias = is_centered, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of x, weight and bias."""
        from fedsift.engine.gpu.one_batch import triton as kernels

        x, weight, mean, inverse_std = ctx.saved_tensors
        clients, width = len(x), x.shape[-1]
        rows = x[0].numel() // width
        block, height, portions, portion = portions_of(clients, rows, width)
        has_sums = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        result = torch.empty_like(x)
        sums = x.new_empty(2, clients, portions, width if has_sums else 0, dtype=torch.float32)
        kernels.norm_gradient_kernel[(portions, clients)](
            x, gradient.contiguous(), weight, mean, inverse_std, result, sums[0], sums[1],
            rows, portion, client_stride(weight),
            WIDTH=width, CENTER=ctx.is_centered, WEIGHT=weight is not None, SUMS=has_sums,
            ROWS=height, BLOCK=block, num_warps=4,
        )  # fmt: skip
        of_weight, of_bias = sums.sum(2) if has_sums else (None, None)
        return (
            result,
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized rows, and the mean and inverse standard deviation of each."""
    from fedsift.engine.gpu.one_batch import triton as kernels

    clients, width = len(x), x.shape[-1]
    rows = x[0].numel() // width
    y = torch.empty_like(x)
    mean, inverse_std = x.new_empty(2, clients * rows, dtype=torch.float32)
    block, height, _, _ = portions_of(clients, rows, width)
    kernels.norm_kernel[(-(-rows // height), clients)](
        x, weight, bias, y, mean, inverse_std, rows, client_stride(weight), eps,
        WIDTH=width, CENTER=is_centered, WEIGHT=weight is not None, BIAS=bias is not None,
        ROWS=height, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y, mean, inverse_std


def portions_of(clients: int, rows: int, width: int) -> tuple[int, int, int, int]:
    """Return the width and height of a block of rows, and the number and length of portions.

    A portion is the rows of a client whose contributions to the gradients one GPU block sums.
    """
    from fedsift.engine.gpu.layers import block_size

    block = block_size(width)
    height = max(1, ELEMENTS // block)
    portions = max(1, min(PORTIONS // clients, -(-rows // height)))
    portion = -(-rows // portions // height) * height
    return block, height, -(-rows // portion), portion


def client_stride(parameter: Tensor | None) -> int:
    """Return how far a client's parameter is from that of the client before; 0 if shared."""
    return 0 if parameter is None or len(parameter) == 1 else parameter.stride(0)


def rms_eps(module: nn.Module) -> float | None:
    """Return the ε of an RMS normalization of PyTorch or Transformers; None for other modules.

    >>> rms_eps(nn.RMSNorm(2, eps=0.5)), rms_eps(nn.LayerNorm(2))
    (0.5, None)
    """
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) and weight.dim() == 1 else None
