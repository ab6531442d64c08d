"""LoRA adapters of each client on a frozen layer, which all clients' samples go through at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Parameters = dict[str, Tensor]


def is_lora(module: nn.Module) -> bool:
    """Whether a module is a linear layer of ``peft`` with one trainable LoRA adapter.

    It adds B A x, scaled, to the output of its frozen base layer.

    >>> is_lora(nn.Linear(2, 2))
    False
    """
    needed = ("lora_A", "lora_B", "base_layer", "scaling", "lora_dropout", "active_adapters")
    if not all(hasattr(module, name) for name in needed):
        return False
    layer: Any = module
    names, trained = list(layer.active_adapters), trained_names(layer)
    is_off = layer.merged or layer.disable_adapters or getattr(layer, "lora_variant", None)
    if type(layer.base_layer) is not nn.Linear or len(names) != 1 or is_off:
        return False
    is_whole = trained == {f"lora_A.{names[0]}.weight", f"lora_B.{names[0]}.weight"}
    return is_whole and getattr(layer.lora_dropout[names[0]], "p", 0.0) == 0.0


def trained_names(module: nn.Module) -> set[str]:
    """Return the names of a module's trainable parameters."""
    return {name for name, p in module.named_parameters() if p.requires_grad}


def lora(module: Any, parameters: Parameters, x: Tensor) -> Tensor:
    """Apply the frozen base layer to all samples, and add each client's adapter."""
    (name,) = module.active_adapters
    a, b = (parameters[f"lora_{part}.{name}.weight"] for part in "AB")
    base = module.base_layer
    rows, dtype = x.flatten(1, -2), torch.promote_types(x.dtype, base.weight.dtype)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    given = (None if t is None else t.to(dtype) for t in (rows, base.weight, base.bias, a, b))
    y: Tensor = LowRank.apply(*given, module.scaling[name])  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class LowRank(torch.autograd.Function):
    """W x + bias + scale · B A x: one product with W for all clients, small ones with A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """Map rows ``(clients, n, inputs)`` to ``(clients, n, outputs)``."""
        y = torch.nn.functional.linear(x.flatten(0, 1), w, bias).view(*x.shape[:2], -1)
        inner = x @ a.mT
        ctx.save_for_backward(x, w, a, b, inner)
        ctx.scale = scale
        return y.baddbmm_(inner, b.mT, alpha=scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of x, A and B."""
        x, w, a, b, inner = ctx.saved_tensors
        of_inner = (gradient @ b).mul_(ctx.scale)
        of_a = of_inner.mT @ x
        of_b = (gradient.mT @ inner).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient.flatten(0, 1) @ w).view_as(x).baddbmm_(of_inner, a)
        return of_x, None, None, of_a, of_b, None
