"""Efficient-Adam: local moments that are never sent, and b-bit steps with error feedback both ways.

C. Chen, L. Shen, W. Liu and Z.-Q. Luo, "Efficient-Adam: Communication-Efficient Distributed Adam",
2022 (arXiv 2205.14473). One local step a round; the quantizer here is uniform with one scale.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from torch import Tensor

from fedsift.adam import adam_step, direction
from fedsift.algorithms.fedadam import Q
from fedsift.algorithms.method import Algorithm, Context, Memory, Phase, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import BITS, Beta1, Beta2, Epsilon, LearningRate, Setting
from fedsift.codec.update import Parts, dense, residual_after
from fedsift.codec.values import Linear
from fedsift.vector import Moments

Bits = Annotated[int, Setting("Bits per coordinate", BITS)]


@method("efficient-adam", label="Efficient-Adam", color="#b07c00", dashed=True)
def efficient_adam(
    bits: Bits = 2,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """Efficient-Adam: bd + q bits a client and round.

    >>> efficient_adam(bits=2).phase(1).paper_bits(100)
    232
    """

    def begin(state: Moments, memory: Memory) -> Moments:
        return Moments(state.w, memory["m"], memory["v"])

    def quantize(wanted: Tensor) -> tuple[Parts, Tensor]:
        coder = Linear(bits, block=None, wide=wanted.dtype.itemsize > 4)
        (part,) = dense({"w": wanted}, coder)
        return (part,), residual_after(wanted, part, "w")

    def send(
        context: Context, start: Moments, end: Moments, memory: Memory
    ) -> tuple[Parts, Memory]:
        update = -lr * direction(end.m, end.v, eps)
        parts, residual = quantize(update + memory["residual"])
        return parts, {"m": end.m, "v": end.v, "residual": residual}

    def broadcast(context: Context, mean: Moments, memory: Memory) -> tuple[Parts, Memory]:
        parts, residual = quantize(mean.w[None] + memory["residual"])
        return parts, {"residual": residual}

    step = partial(adam_step, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
    phase = Phase(1, step, send, lambda d: bits * d + Q, begin=begin, broadcast=broadcast)
    return Algorithm(
        always(phase), client_memory=("m", "v", "residual"), server_memory=("residual",)
    )
