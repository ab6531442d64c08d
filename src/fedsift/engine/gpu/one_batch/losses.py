"""The cross-entropy of all clients' tokens, and its gradient, for vocabularies of any size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsift.engine.gpu.one_batch.backend import has_kernels
from fedsift.task import Loss
from fedsift.task.losses import IGNORED, next_token_loss, sequence_cross_entropy

MAX_BLOCK = 4096
"""The most classes that a GPU block loads at a time."""


def is_fused(loss: Loss, output: object, labels: object) -> bool:
    """Whether the loss of outputs ``(clients, batch, ...)`` is one that the kernel computes."""
    if not (isinstance(output, Tensor) and isinstance(labels, Tensor) and has_kernels(output)):
        return False
    is_known = loss in (next_token_loss, sequence_cross_entropy)
    is_known = is_known or (loss is cross_entropy and output.dim() == 3)
    return is_known and labels.dtype == torch.int64 and labels.shape == output.shape[:-1]


def losses_and_slope(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each client's mean loss, and the gradient of the output."""
    from fedsift.engine.gpu.layers import block_size
    from fedsift.engine.gpu.one_batch import triton as kernels

    classes = output.shape[-1]
    output, labels = output.contiguous(), labels.flatten(1).contiguous()
    clients, rows = labels.shape
    share = 1.0 / (labels != IGNORED).sum(1).float()
    slope = torch.empty_like(output)
    losses = torch.empty(clients, rows, device=output.device)
    block = min(MAX_BLOCK, block_size(classes))
    kernels.cross_entropy_kernel[(rows, clients)](
        output, labels, slope, losses, share, rows, classes, IGNORED,
        BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip
    return losses.sum(1) * share, slope
