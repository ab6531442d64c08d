"""The memory layout of a stack's parameters while it trains by layers: channels last, aligned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from fedsift.engine.gpu.weight import Weight
from fedsift.vector import Layout

ALIGNMENT = 16
"""Every parameter starts at a multiple of this many numbers, which allows wide loads."""
BLOCK = 1024
"""Numbers that one block of the optimizer's kernel updates."""


@dataclass(frozen=True)
class ChannelsLastLayout:
    """Where each parameter lies in a row of a stack; convolution weights have channels last.

    The optimizers work coordinate by coordinate and need no particular order. A stack is therefore
    copied to this layout when a round begins, and back when it ends.
    """

    layout: Layout

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each parameter, and the end of the last one."""
        padded = (-(-size // ALIGNMENT) * ALIGNMENT for size in self.layout.sizes)
        return tuple(accumulate(padded, initial=0))

    @property
    def length(self) -> int:
        """The length of a row: a multiple of BLOCK."""
        return -(-self.offsets[-1] // BLOCK) * BLOCK

    def views(self, stack: Tensor) -> dict[str, Tensor]:
        """Return views ``(clients, *shape)`` of a stack ``(clients, length)``, by parameter."""
        named = zip(
            self.layout.names, self.layout.shapes, self.layout.sizes, self.offsets, strict=False
        )
        return {
            name: stack[:, start : start + size].view(len(stack), *_channels_last(shape))
            for name, shape, size, start in named
        }

    def weights(self, value: Tensor, low_precision: Tensor, gradient: Tensor) -> dict[str, Weight]:
        """Return each parameter by name as views of three stacks ``(clients, length)``."""
        views = [self.views(x) for x in (value, low_precision, gradient)]
        return {name: Weight(*(view[name] for view in views)) for name in self.layout.names}

    def pack(self, stack: Tensor, out: Tensor) -> None:
        """Copy a stack ``(clients, d)`` into ``out``, which has this layout.

        >>> layout = ChannelsLastLayout(Layout.of(nn.Conv2d(2, 1, (1, 2), bias=False)))
        >>> packed = torch.zeros(1, layout.length)
        >>> layout.pack(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), packed)
        >>> packed[:, :5].tolist(), layout.unpack(packed).tolist()
        ([[1.0, 3.0, 2.0, 4.0, 0.0]], [[1.0, 2.0, 3.0, 4.0]])
        """
        packed = self.views(out)
        for name, x in self.layout.unflatten(stack).items():
            packed[name].copy_(x.permute(0, 1, 3, 4, 2) if x.dim() == 5 else x)

    def unpack(self, stack: Tensor) -> Tensor:
        """Return a stack in this layout as a new stack ``(clients, d)``."""
        result = stack.new_empty(len(stack), self.layout.d)
        unpacked = self.layout.unflatten(result)
        for name, x in self.views(stack).items():
            unpacked[name].copy_(x.permute(0, 1, 4, 2, 3) if x.dim() == 5 else x)
        return result


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape
