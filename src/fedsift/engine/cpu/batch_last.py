"""Convolution and pooling layers that keep the batch as the innermost axis of memory.

With channels innermost, a convolution of 1 or 10 channels leaves most of a vector register empty,
and with pixels innermost so does a pool. The samples of a batch always fill it. The layers keep the
shape (N, C, H, W), but store it in memory as (H, C, W, N), which other layers accept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedsift.engine.cpu import native
from fedsift.engine.cpu.functions import (
    BatchLastConvolution,
    BatchLastConvolutionPool,
    BatchLastMaxPool,
)
from fedsift.engine.cpu.kernel_support import (
    can_convolve,
    fusible_kind,
    is_supported_convolution,
    is_supported_input,
    padding_of,
)
from fedsift.task import has_hooks


def use_batch_last(model: nn.Module) -> bool:
    """Replace a model's layers by batch-last layers with the same parameters, if that is faster.

    Returns whether the layers were replaced.

    >>> model = nn.Sequential(nn.Conv2d(1, 512, 5), nn.MaxPool2d(2))
    >>> use_batch_last(model)
    False
    """
    sequences = [module for module in model.modules() if type(module) is nn.Sequential]
    if not has_supported_layers(model, sequences) or native.load() is None:
        return False
    replacements: dict[nn.Module, nn.Module] = {}
    if only_sequences_call_their_layers(model, sequences):
        for sequence in sequences:
            replacements |= fuse_pools(sequence)
    for module in model.modules():
        if type(module) is nn.Conv2d and module not in replacements:
            replacements[module] = BatchLastConv2d(module)
        elif isinstance(module, nn.MaxPool2d) and fusible_kind(module) == "pool":
            replacements[module] = BatchLastMaxPool2d(module)
    replace_modules(model, replacements)
    return True


def has_supported_layers(model: nn.Module, sequences: Sequence[nn.Sequential]) -> bool:
    """Whether the model has convolutions, all of them supported, each in one place of a sequence.

    A convolution outside a sequence may be followed by a functional pool, which is slow in this
    memory format, and so is batch normalization. A convolution that is used several times must be
    followed by the same layers each time.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return False
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    places = Counter(layer for sequence in sequences for layer in sequence)
    is_supported = all(
        places[layer] == 1 and is_supported_convolution(layer) for layer in convolutions
    )
    return bool(convolutions) and is_supported and not any(map(has_hooks, model.modules()))


def replace_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Replace modules of a model in every place where they are registered.

    >>> model, tanh = nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), nn.Tanh()
    >>> replace_modules(model, {model[0]: tanh})
    >>> model[0] is tanh
    True
    """
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replacements[module])


def only_sequences_call_their_layers(model: nn.Module, sequences: Sequence[nn.Sequential]) -> bool:
    """Whether tracing shows that only the sequences call their layers.

    >>> layers = nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2))
    >>> only_sequences_call_their_layers(layers, [layers])
    True
    """
    tracer = CallTracer(model)
    try:
        tracer.trace(model)
    except Exception:  # a forward pass may raise anything
        return False
    homes = {layer: [s for s in sequences if layer in set(s)] for s in sequences for layer in s}
    return all(caller in homes.get(layer, [caller]) for caller, layer in tracer.calls)


class CallTracer(fx.Tracer):
    """Traces a model's forward pass and records which module calls which."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.callers = [model]
        self.calls: list[tuple[nn.Module, nn.Module]] = []

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Record the call and trace it."""
        self.calls.append((self.callers[-1], m))
        self.callers.append(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.callers.pop()


def fuse_pools(sequence: nn.Sequential) -> dict[nn.Module, nn.Module]:
    """Return fused layers for convolutions that are followed by a pool and possibly a ReLU.

    The pool and the ReLU become identities in this sequence only: they may also be used elsewhere.
    """
    fused: dict[nn.Module, nn.Module] = {}
    layers = list(sequence)
    for place, layer in enumerate(layers):
        match [fusible_kind(follower) for follower in layers[place + 1 : place + 3]]:
            case ["pool", "relu"] | ["relu", "pool"]:
                followers = 2
            case ["pool", *_]:
                followers = 1
            case _:
                continue
        if type(layer) is nn.Conv2d:
            fused[layer] = BatchLastConvPool2d(layer, relu=followers == 2)
            for follower in range(place + 1, place + 1 + followers):
                sequence[follower] = nn.Identity()
    return fused


class BatchLastConv2d(nn.Conv2d):
    """A convolution that stores its output with the batch innermost."""

    def __init__(self, layer: nn.Conv2d) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)  # the same parameters and settings

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (N, C, H, W)."""
        if not can_convolve(self, x):
            return super().forward(x)
        rows = to_rows(padded(self, x))
        return from_rows(apply(BatchLastConvolution, rows, self.weight, self.bias))


class BatchLastConvPool2d(nn.Conv2d):
    """A convolution with a 2 × 2 max pool and optionally a ReLU."""

    def __init__(self, layer: nn.Conv2d, relu: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)  # the same parameters and settings
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and pool x (N, C, H, W)."""
        if not can_convolve(self, x, min_size=2):
            y = nn.functional.max_pool2d(super().forward(x), 2)
            return y.relu() if self.relu else y
        rows = to_rows(padded(self, x))
        return from_rows(apply(BatchLastConvolutionPool, rows, self.weight, self.bias, self.relu))


class BatchLastMaxPool2d(nn.MaxPool2d):
    """A 2 × 2 max pool of tensors with the batch innermost."""

    def __init__(self, layer: nn.MaxPool2d) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)

    def forward(self, x: Tensor) -> Tensor:
        """Pool x (N, C, H, W)."""
        is_supported = is_supported_input(x) and min(x.shape[2:]) >= 2
        if not is_supported or not to_rows(x).is_contiguous():
            pooled: Tensor = super().forward(x)
            return pooled
        return from_rows(apply(BatchLastMaxPool, to_rows(x)))


def padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return x with the zeros that a convolution adds on each side."""
    rows, columns = padding_of(layer)
    return nn.functional.pad(x, (columns, columns, rows, rows)) if rows or columns else x


def to_rows(x: Tensor) -> Tensor:
    """View (N, C, H, W) as (H, C, W, N)."""
    return x.permute(2, 1, 3, 0)


def from_rows(x: Tensor) -> Tensor:
    """View (H, C, W, N) as (N, C, H, W)."""
    return x.permute(3, 1, 0, 2)


def apply(function: type[torch.autograd.Function], *inputs: Tensor | bool | None) -> Tensor:
    """Apply an autograd function."""
    y: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return y
