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
        mean, factor = mean[:, None], inverse_std[:, None]
        y = (x - mean) * (factor if scale is None else factor * scale.value[:, None])
        y = y if bias is None else y + bias.value[:, None]
        y = (y.relu_() if relu else y).to(x.dtype)
        ctx.arguments = scale, bias, is_batch, relu
        ctx.save_for_backward(x, y if relu else y.new_empty(0), mean, factor)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of x; write those of the parameters to their buffers."""
        scale, bias, is_batch, relu = ctx.arguments
        x, y, mean, factor = ctx.saved_tensors
        if relu:
            gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        normalized, slope = (x - mean) * factor, gradient.float()
        sums = slope.sum(1, keepdim=True)
        products = (slope * normalized).sum(1, keepdim=True)
        if bias is not None:
            bias.gradient.copy_(sums[:, 0])
        if scale is not None:
            scale.gradient.copy_(products[:, 0])
            factor = factor * scale.value[:, None]
        if is_batch:
            slope = slope - (sums + normalized * products) / x.shape[1]
        return None, (slope * factor).to(x.dtype), None, None, None, None, None, None
