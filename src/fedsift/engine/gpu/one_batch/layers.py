"""Known layers with each client's own parameters, on samples ``(clients, batch, ...)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from fedsift.engine.gpu.one_batch.backend import has_kernels
from fedsift.engine.gpu.one_batch.norms import normalized
from fedsift.engine.gpu.unsupported import UnsupportedModel

Parameters = dict[str, Tensor]
"""A unit's trainable parameters ``(clients, *shape)`` by their names in the unit."""


def parameter_of(module: nn.Module, parameters: Parameters, name: str) -> Tensor | None:
    """Return a parameter of each client, or ``(1, *shape)`` if it is the same for all.

    >>> layer = nn.Linear(2, 3)
    >>> parameter_of(layer, {"weight": torch.zeros(5, 3, 2)}, "weight").shape
    torch.Size([5, 3, 2])
    >>> parameter_of(layer, {}, "bias").shape
    torch.Size([1, 3])
    """
    if name in parameters:
        return parameters[name]
    path, _, last = name.rpartition(".")
    shared: Tensor | None = getattr(module.get_submodule(path), last)
    return None if shared is None else shared[None]


def linear_of_clients(module: nn.Linear, parameters: Parameters, x: Tensor) -> Tensor:
    """Apply each client's matrix to its rows."""
    weight = parameter_of(module, parameters, "weight")
    assert weight is not None
    bias = parameter_of(module, parameters, "bias")
    return product(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return each client's rows times its matrix ``(outputs, inputs)``, plus its bias."""
    clients = len(x)
    weight = weight.expand(clients, -1, -1)
    bias = None if bias is None else bias.expand(clients, -1)
    if has_kernels(x) and weight.dtype == torch.bfloat16:
        y = Product.apply(x.flatten(1, -2), weight, bias)  # type: ignore[no-untyped-call]
    else:
        y = x.flatten(1, -2).to(weight.dtype) @ weight.mT
        y = y if bias is None else y + bias[:, None]
    result: Tensor = y.unflatten(1, x.shape[1:-1])
    return result


class Product(torch.autograd.Function):
    """Rows ``(clients, n, inputs)`` times matrices in bfloat16, and the bias in the same kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the rows ``(clients, n, outputs)``."""
        from fedsift.engine.gpu.layers import Window, convolve

        x, weight = x.to(weight.dtype).contiguous(), weight.contiguous()
        y = x.new_empty(*x.shape[:2], weight.shape[1])
        convolve(as_image(x), weight, bias, as_image(y), Window(), False, "tf32")
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of x, weight and bias."""
        from fedsift.engine.gpu.layers import Window, weight_gradient

        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_weight = torch.empty_like(weight, dtype=torch.float32)
        of_bias = weight.new_empty(weight.shape[:2], dtype=torch.float32) if ctx.has_bias else None
        weight_gradient(
            as_image(x), as_image(gradient), of_weight[:, :, None, None], of_bias, Window(), "tf32"
        )
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, of_weight, of_bias


def as_image(rows: Tensor) -> Tensor:
    """Return rows ``(clients, n, channels)`` as images of one pixel.

    >>> as_image(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 1, 1, 4])
    """
    return rows[:, :, None, None]


def embedding_of_clients(module: nn.Embedding, parameters: Parameters, x: Tensor) -> Tensor:
    """Look up each client's own vectors."""
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise UnsupportedModel("an embedding with max_norm, sparse or scale_grad_by_freq")
    table, padding = parameters["weight"], module.padding_idx
    clients, entries, width = table.shape
    shift = torch.arange(clients, device=x.device).view(-1, *[1] * (x.dim() - 1)) * entries
    found = embedding(x + shift, table.reshape(-1, width))
    return (
        found if padding is None else torch.where((x == padding)[..., None], found.detach(), found)
    )


def layer_norm_of_clients(module: nn.LayerNorm, parameters: Parameters, x: Tensor) -> Tensor:
    """Normalize, then apply each client's scale and bias."""
    if len(module.normalized_shape) > 1:
        raise UnsupportedModel("a layer normalization of several axes")
    weight, bias = (parameter_of(module, parameters, name) for name in ("weight", "bias"))
    return normalized(x, weight, bias, module.eps, is_centered=True)


def rms_norm_of_clients(eps: float, module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    """Normalize by the root mean square, then apply each client's scale."""
    return normalized(x, parameters["weight"], None, eps, is_centered=False)
