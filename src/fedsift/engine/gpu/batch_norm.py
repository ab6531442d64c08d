"""Batch normalization of all clients of a stack at once, each over its own batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsift.engine.gpu.weight import Weight


@dataclass(frozen=True)
class RunningStatistics:
    """The running statistics of every client ``(clients, channels)``, and how they change.

    ``batches`` ``(clients,)`` counts the batches. Without a momentum, each counts equally.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor
    momentum: float | None

    def values(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance."""
        return self.mean, self.variance

    def update(self, mean: Tensor, variance: Tensor, rows: int) -> None:
        """Take in a batch of ``rows`` numbers per channel, with its biased variance."""
        self.batches.add_(1)
        new = self.batches.reciprocal()[:, None] if self.momentum is None else self.momentum
        self.mean.add_((mean - self.mean) * new)
        self.variance.add_((variance * (rows / (rows - 1)) - self.variance) * new)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of each channel of x ``(clients, rows, channels)``.

    >>> moments(torch.tensor([[[1.0], [3.0]]]))
    (tensor([[2.]]), tensor([[1.]]))
    """
    variance, mean = torch.var_mean(x.detach().float(), 1, correction=0)
    return mean, variance


class StackedBatchNorm(torch.autograd.Function):
    """Normalization with each client's scale and bias, optionally followed by ReLU.

    ``is_batch`` says that mean and variance are those of x itself, and so depend on it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        scale: Weight | None,
        bias: Weight | None,
        mean: Tensor,
        inverse_std: Tensor,
        is_batch: bool,
        relu: bool,
    ) -> Tensor:
        """Normalize x ``(clients, rows, channels)``, then apply ReLU if ``relu``."""
        factor = inverse_std if scale is None else inverse_std * scale.value
        shift = -mean * factor if bias is None else bias.value - mean * factor
        y = torch.addcmul(shift[:, None], x, factor[:, None]).to(x.dtype)
        y = y.relu_() if relu else y
        ctx.arguments = scale, bias, is_batch, relu
        ctx.save_for_backward(x, y if relu else y.new_empty(0), mean, inverse_std)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of x; write those of the parameters to their buffers."""
        scale, bias, is_batch, relu = ctx.arguments
        x, y, mean, inverse_std = ctx.saved_tensors
        if relu:
            gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        sums = gradient.sum(1, dtype=mean.dtype)
        products = (x - mean[:, None]).mul_(gradient).sum(1) * inverse_std
        if bias is not None:
            bias.gradient.copy_(sums)
        if scale is not None:
            scale.gradient.copy_(products)
        factor = inverse_std if scale is None else inverse_std * scale.value
        result = gradient * factor[:, None]
        if is_batch:  # subtract the part of the gradient along the mean and along the variance
            slope = factor * products * inverse_std / x.shape[1]
            shift = slope * mean - factor * sums / x.shape[1]
            result += torch.addcmul(shift[:, None], x, -slope[:, None])
        return None, result.to(x.dtype), None, None, None, None, None, None
