"""PyTorch's ``MultiheadAttention`` with each client's own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fedsift.engine.gpu.one_batch.layers import Parameters, parameter_of, product


def attention(
    module: nn.MultiheadAttention,
    parameters: Parameters,
    clients: int,
    otherwise: Callable[..., Any],
) -> Callable[..., Any]:
    """Return what replaces the module's ``forward``: fused self-attention of all samples.

    Calls that it does not cover, such as those with masks, go to ``otherwise``.
    """

    def compute(q: Tensor, k: Tensor, v: Tensor, *masks: Any, **options: Any) -> Any:
        is_causal = causality(module, *masks, **options) if q is k is v else None
        if is_causal is None:
            return otherwise(q, k, v, *masks, **options)
        rows = q.view(clients, -1, *q.shape[1:])
        qkv = project(module, parameters, "in_proj_weight", "in_proj_bias", rows).flatten(0, 1)
        heads = qkv.view(*qkv.shape[:2], 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(
            heads[0],
            heads[1],
            heads[2],
            dropout_p=module.dropout if module.training else 0.0,
            is_causal=is_causal,
        )
        rows = mixed.transpose(1, 2).reshape(rows.shape)
        out = project(module, parameters, "out_proj.weight", "out_proj.bias", rows)
        return out.flatten(0, 1), None

    return compute


def causality(
    module: nn.MultiheadAttention,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> bool | None:
    """Whether a call of a module for self-attention is causal; None if it needs another mask."""
    is_plain = module.batch_first and module._qkv_same_embed_dim and module.bias_k is None
    has_mask = key_padding_mask is not None or (attn_mask is not None and not is_causal)
    is_covered = is_plain and not (has_mask or need_weights or module.add_zero_attn)
    return is_causal if is_covered else None


def project(
    module: nn.Module, parameters: Parameters, weight: str, bias: str, rows: Tensor
) -> Tensor:
    """Return the rows times a named matrix, plus a named bias if there is one."""
    matrix = parameter_of(module, parameters, weight)
    assert matrix is not None
    return product(rows, matrix, parameter_of(module, parameters, bias))
