"""Faster forms of the modules of Llama-style language models, which compute the same.

A module is recognized by its parts. Whether the result is the same is checked by the gradients that
the whole model has with these forms, so a module that only looks alike does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fedsift.engine.gpu.one_batch.backend import has_kernels
from fedsift.engine.gpu.one_batch.norms import normalized, rms_eps

Compute = Callable[..., Any]
BLOCK = 1024


def rewrites(model: nn.Module) -> Iterator[tuple[nn.Module, Compute]]:
    """Yield modules that have a faster ``forward``, and this.

    >>> [module for module, _ in rewrites(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    []
    """
    for module in model.modules():
        eps = rms_eps(module)
        if eps is not None and not any(p.requires_grad for p in module.parameters()):
            yield module, frozen_rms_norm(module.get_parameter("weight"), eps)
        elif is_gated(module):
            yield module, gated(module)
        elif is_rotary_attention(module):
            yield module, rotary_attention(module)


def frozen_rms_norm(weight: Tensor, eps: float) -> Compute:
    """Return an RMS normalization with the same weight for all clients."""
    return lambda x: normalized(x[None], weight[None], None, eps, is_centered=False)[0]


def has_parts(module: nn.Module, *names: str) -> bool:
    """Whether a module has attributes of these names.

    >>> has_parts(nn.Linear(1, 1), "weight", "bias")
    True
    """
    return all(hasattr(module, name) for name in names)


def is_gated(module: nn.Module) -> bool:
    """Whether a module is an MLP of the form down(silu(gate(x)) · up(x))."""
    if not has_parts(module, "gate_proj", "up_proj", "down_proj", "act_fn"):
        return False
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def gated(module: Any) -> Compute:
    """Return the MLP with one kernel between its products."""
    return lambda x: module.down_proj(silu_times(module.gate_proj(x), module.up_proj(x)))


def silu_times(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) · x.

    >>> silu_times(torch.tensor([0.0, 50.0]), torch.tensor([3.0, 2.0]))
    tensor([  0., 100.])
    """
    if not has_kernels(gate):
        return nn.functional.silu(gate) * x
    found: Tensor = Gate.apply(gate.contiguous(), x.contiguous())  # type: ignore[no-untyped-call]
    return found


class Gate(torch.autograd.Function):
    """silu(gate) · x."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        """Multiply."""
        from fedsift.engine.gpu.one_batch import triton as kernels

        ctx.save_for_backward(gate, x)
        y = torch.empty_like(x)
        kernels.gate_kernel[(-(-x.numel() // BLOCK),)](gate, x, y, x.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of gate and x."""
        from fedsift.engine.gpu.one_batch import triton as kernels

        gate, x = ctx.saved_tensors
        results = torch.empty_like(gate), torch.empty_like(x)
        kernels.gate_gradient_kernel[(-(-x.numel() // BLOCK),)](
            gate, x, gradient.contiguous(), *results, x.numel(), BLOCK=BLOCK
        )
        return results


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "num_key_value_groups")
OTHERS = ("q_norm", "k_norm", "sinks", "rotary_fn")
"""Parts of attention modules that compute something else."""
HEAD_WIDTHS = (32, 64, 128, 256)
"""A GPU block loads half of a head, which must be a power of two."""


def is_rotary_attention(module: nn.Module) -> bool:
    """Whether a module is attention with rotary positions, as Llama has it."""
    if not has_parts(module, *ATTENTION) or any(hasattr(module, name) for name in OTHERS):
        return False
    has_window = getattr(module, "sliding_window", None) is not None
    return (
        type(module).__name__.endswith("Attention")
        and module.head_dim in HEAD_WIDTHS
        and not has_window
    )


def rotary_attention(module: Any) -> Compute:
    """Return the attention with one kernel per rotation, and keys that are not repeated."""
    otherwise = type(module).forward

    def compute(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        angles: Any = named.get("position_embeddings")
        mask = named.get("attention_mask")
        if others or not is_covered(module, hidden_states, angles, named.get("past_key_values")):
            return otherwise(module, hidden_states, *others, **named)
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (p(hidden_states).unflatten(-1, (-1, module.head_dim)) for p in projections)
        mixed = scaled_dot_product_attention(
            rotated(q, *angles).transpose(1, 2),
            rotated(k, *angles).transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and module.is_causal,
            scale=module.scaling,
            enable_gqa=module.num_key_value_groups > 1,
        )
        return module.o_proj(mixed.transpose(1, 2).flatten(2)), None

    return compute


def is_covered(module: Any, hidden_states: Tensor, angles: Any, cache: Any) -> bool:
    """Whether a call needs neither a cache nor dropout, and turns all of each head."""
    has_dropout = module.training and getattr(module, "attention_dropout", 0.0) > 0
    if angles is None or cache is not None or has_dropout or not has_kernels(hidden_states):
        return False
    samples, tokens, _ = hidden_states.shape
    known = [(n, tokens, module.head_dim) for n in (1, samples)]
    return all(tuple(x.shape) in known for x in angles)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the heads ``(samples, tokens, heads, width)`` turned by the angles of their tokens."""
    found: Tensor = Rotation.apply(x.contiguous(), cos.contiguous(), sin.contiguous())  # type: ignore[no-untyped-call]
    return found


class Rotation(torch.autograd.Function):
    """(x₁, x₂) → (x₁ cos - x₂ sin, x₂ cos + x₁ sin) for the two halves of each head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn."""
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, is_back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Turn the gradient back."""
        cos, sin = ctx.saved_tensors
        return turn(gradient.contiguous(), cos, sin, is_back=True), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    """Turn heads, or turn them back."""
    from fedsift.engine.gpu.layers import block_size
    from fedsift.engine.gpu.one_batch import triton as kernels

    samples, tokens, heads, width = x.shape
    y = torch.empty_like(x)
    kernels.rotate_kernel[(samples * tokens,)](
        x, cos, sin, y, tokens, heads * width, int(len(cos) > 1),
        HEADS=heads, HALF=width // 2, BACKWARD=is_back, BLOCK=block_size(heads), num_warps=2,
    )  # fmt: skip
    return y
