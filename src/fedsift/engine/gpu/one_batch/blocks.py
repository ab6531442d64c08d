"""Pre-norm Transformer blocks in few GPU kernels, with each client's own parameters.

Between two matrix products, a block only moves memory: normalization, GELU, residual connections
and copies for attention. Here they are computed by the kernels of the products where possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsift.engine.gpu.one_batch.backend import has_kernels
from fedsift.engine.gpu.one_batch.norms import normalize
from fedsift.engine.gpu.unsupported import UnsupportedModel
from fedsift.engine.gpu.weight import Weight
from fedsift.task import has_hooks

MAX_TOKENS = 128
"""The longest sample whose keys one GPU block loads."""
HEAD_WIDTHS = (16, 32, 64, 128)

LAYERS = INPUTS, OUTPUT, UP, DOWN = (
    "attention.1.inputs",
    "attention.1.output",
    "network.1",
    "network.3",
)
"""The linear layers of a block."""

Weights = dict[str, Weight]


def fusible_blocks(model: nn.Module, like: Tensor) -> Iterator[nn.Module]:
    """Yield the pre-norm blocks of a model whose matrices have the device and dtype of ``like``.

    Blocks that share parameters with other modules are left out.
    """
    if not has_block_kernels(like):
        return
    uses = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    for module in model.modules():
        if is_block(module) and all(uses[p] == 1 for p in module.parameters()):
            yield module


def has_block_kernels(x: Tensor) -> bool:
    """Whether the kernels are faster than PyTorch for products of the format of x.

    >>> has_block_kernels(torch.zeros(1))
    False
    """
    return has_kernels(x) and x.dtype == torch.bfloat16


def is_block(module: nn.Module) -> bool:
    """Whether a module is made of the parts of a pre-norm block.

    They are ``attention``, a normalization and self-attention with the layers ``inputs`` and
    ``output``, and ``network``, a normalization and two linear layers with GELU between them.
    """
    attention, network = (getattr(module, name, None) for name in ("attention", "network"))
    if type(attention) is not nn.Sequential or type(network) is not nn.Sequential:
        return False
    mlp = [nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear]
    if len(attention) != 2 or type(attention[0]) is not nn.LayerNorm or not is_mixer(attention[1]):
        return False
    if [type(part) for part in network] != mlp or getattr(network[2], "approximate", "") != "none":
        return False
    is_whole = len(list(module.parameters())) == 12 and not any(map(has_hooks, module.modules()))
    return is_whole and all(p.requires_grad for p in module.parameters())


def is_mixer(module: nn.Module) -> bool:
    """Whether a module looks like self-attention with one layer for queries, keys and values.

    >>> is_mixer(nn.Linear(2, 2))
    False
    """
    layers = (getattr(module, name, None) for name in ("inputs", "output"))
    has_heads = isinstance(getattr(module, "heads", None), int) and hasattr(module, "is_causal")
    return has_heads and all(type(layer) is nn.Linear for layer in layers)


@dataclass(frozen=True)
class Block:
    """One use of a block: the module, its parameters and the number of clients."""

    module: Any
    weights: Weights
    clients: int

    @property
    def heads(self) -> int:
        """The number of heads of the attention."""
        return int(self.module.attention[1].heads)

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to itself and earlier ones only."""
        return bool(self.module.attention[1].is_causal)

    def matrix(self, name: str) -> Tensor:
        """Return the matrices ``(clients, outputs, inputs)`` of a linear layer."""
        return self.weights[f"{name}.weight"].low_precision.contiguous()

    def bias(self, name: str) -> Tensor:
        """Return each client's bias of a linear layer."""
        return self.value(f"{name}.bias")

    def value(self, name: str) -> Tensor:
        """Return a parameter of each client."""
        return self.weights[name].value

    def gradient(self, name: str) -> Tensor:
        """Return the memory for the gradient of a parameter."""
        return self.weights[name].gradient

    def write(self, *names: str, totals: Iterable[Tensor]) -> None:
        """Write the gradients of named parameters."""
        for name, total in zip(names, totals, strict=True):
            self.gradient(name).copy_(total)

    def normalize(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a layer normalization; return also the mean and inverse standard deviation."""
        scale, bias = self.value(f"{name}.weight"), self.value(f"{name}.bias")
        eps = self.module.get_submodule(name).eps
        return normalize(x, scale, bias, eps, is_centered=True)

    def check(self, x: Tensor) -> None:
        """Raise UnsupportedModel for samples that the kernels do not take."""
        width = x.shape[-1] // self.heads
        if x.dim() != 3 or x.shape[1] > MAX_TOKENS or width not in HEAD_WIDTHS:
            raise UnsupportedModel(f"samples {tuple(x.shape[1:])} in {self.heads} heads")


def fused_block(
    module: nn.Module, weights: Weights, clients: int, anchor: Tensor
) -> Callable[..., Tensor]:
    """Return what replaces a block's ``forward``. The anchor keeps it in the graph of gradients."""
    block = Block(module, weights, clients)

    def compute(x: Tensor) -> Tensor:
        block.check(x)
        y: Tensor = PreNormBlock.apply(anchor, x, block)  # type: ignore[no-untyped-call]
        return y

    return compute


class PreNormBlock(torch.autograd.Function):
    """x + attention(norm(x)), and the same with an MLP. Writes the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, block: Block) -> Tensor:
        """Map samples ``(all samples, tokens, width)`` to the same shape."""
        matrices = [block.matrix(name) for name in LAYERS]
        rows = x.to(matrices[0].dtype).reshape(block.clients, -1, x.shape[-1])
        middle, of_attention = _attend(block, matrices, rows, x.shape[0])
        y, of_network = _transform(block, matrices, middle)
        ctx.block, ctx.dtype, ctx.split = block, x.dtype, len(of_attention)
        ctx.save_for_backward(*matrices, *of_attention, *of_network)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of x; write those of the parameters to their memory."""
        matrices, saved = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        of_attention, of_network = saved[: ctx.split], saved[ctx.split :]
        rows = gradient.to(matrices[0].dtype).contiguous().view_as(of_attention[0])
        of_middle = _transform_backward(ctx.block, matrices, of_network, rows)
        of_x = _attend_backward(ctx.block, matrices, of_attention, of_middle)
        return None, of_x.view_as(gradient).to(ctx.dtype), None


def _attend(
    block: Block, matrices: Sequence[Tensor], rows: Tensor, samples: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return rows + attention(norm(rows)), and what its gradient needs."""
    from fedsift.engine.gpu.one_batch import fused

    inputs, output, *_ = matrices
    normal, mean, root = block.normalize("attention.0", rows)
    qkv = fused.product(normal, inputs.mT, block.bias(INPUTS))
    qkv = qkv.view(samples, -1, 3, block.heads, rows.shape[-1] // block.heads)
    mixed = fused.attention(qkv, block.is_causal).view_as(rows)
    y = fused.product(mixed, output.mT, block.bias(OUTPUT), rows)
    return y, (rows, normal, mean, root, qkv, mixed)


def _transform(
    block: Block, matrices: Sequence[Tensor], rows: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return rows + network(norm(rows)), and what its gradient needs."""
    from fedsift.engine.gpu.one_batch import fused

    *_, up, down = matrices
    normal, mean, root = block.normalize("network.0", rows)
    active, slope = fused.product_and_gelu(normal, up.mT, block.bias(UP))
    y = fused.product(active, down.mT, block.bias(DOWN), rows)
    return y, (rows, normal, mean, root, active, slope)


def _transform_backward(
    block: Block, matrices: Sequence[Tensor], saved: Sequence[Tensor], gradient: Tensor
) -> Tensor:
    """Return the gradient of the rows; write those of the MLP's parameters."""
    from fedsift.engine.gpu.one_batch import fused

    (*_, up, down), (rows, normal, mean, root, active, slope) = matrices, saved
    fused.gradient_of_weight(active, gradient, block.gradient(f"{DOWN}.weight"))
    of_up, of_bias = fused.product_times(gradient, down, slope)
    fused.gradient_of_weight(normal, of_up, block.gradient(f"{UP}.weight"))
    scale = block.value("network.0.weight")
    result, sums = fused.residual_norm_gradient(rows, of_up @ up, gradient, scale, mean, root)
    block.write("network.0.weight", "network.0.bias", f"{DOWN}.bias", totals=sums)
    block.write(f"{UP}.bias", totals=[of_bias])
    return result


def _attend_backward(
    block: Block, matrices: Sequence[Tensor], saved: Sequence[Tensor], gradient: Tensor
) -> Tensor:
    """Return the gradient of the rows; write those of the attention's parameters."""
    from fedsift.engine.gpu.one_batch import fused

    (inputs, output, *_), (rows, normal, mean, root, qkv, mixed) = matrices, saved
    fused.gradient_of_weight(mixed, gradient, block.gradient(f"{OUTPUT}.weight"))
    of_qkv, of_samples = fused.attention_gradient(qkv, gradient @ output, block.is_causal)
    of_qkv = of_qkv.view(*rows.shape[:2], -1)
    fused.gradient_of_weight(normal, of_qkv, block.gradient(f"{INPUTS}.weight"))
    scale = block.value("attention.0.weight")
    result, sums = fused.residual_norm_gradient(rows, of_qkv @ inputs, gradient, scale, mean, root)
    block.write("attention.0.weight", "attention.0.bias", f"{OUTPUT}.bias", totals=sums)
    block.write(
        f"{INPUTS}.bias", totals=[of_samples.view(block.clients, -1, of_samples.shape[1]).sum(1)]
    )
    return result
