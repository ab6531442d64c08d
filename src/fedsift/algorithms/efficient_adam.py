"""Efficient-Adam: local moments that are never sent, and b-bit steps with error feedback both ways.

C. Chen, L. Shen, W. Liu and Z.-Q. Luo, "Efficient-Adam: Communication-Efficient Distributed Adam",
2022 (arXiv 2205.14473).

There is one local step per round. The quantizer here is uniform with one scale.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fedsift.adam import AdamStep, direction
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q, always
from fedsift.algorithms.registry import method
from fedsift.algorithms.settings import BITS, Beta1, Beta2, Epsilon, LearningRate, Setting
from fedsift.codec.update import Parts, dense, residual_after
from fedsift.codec.values import Linear
from fedsift.vector import State

Bits = Annotated[int, Setting("Bits per coordinate", BITS)]


@method("efficient-adam", label="Efficient-Adam", color="#b07c00", dashed=True)
def efficient_adam(
    bits: Bits = 2,
    lr: LearningRate = 1e-3,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Epsilon = 1e-6,
) -> Algorithm:
    """Distributed Adam with moments kept by the clients and b-bit steps, with error feedback.

    Uplink per client and round: bd + q bits.

    >>> efficient_adam(bits=2).phase(1).paper_bits(100)
    232
    """

    def local_start(state: State, memory: Memory) -> State:
        return State(w=state.w, m=memory["m"], v=memory["v"])

    def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
        m, v = update.end.m, update.end.v
        parts, residual = quantized(-lr * direction(m, v, eps) + memory["residual"], bits)
        return parts, {"m": m, "v": v, "residual": residual}

    def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
        parts, residual = quantized(mean.w[None] + memory["residual"], bits)
        return parts, {"residual": residual}

    step = AdamStep(lr, beta1, beta2, eps)
    phase = Phase(
        1, step, send, lambda d: bits * d + Q, local_start=local_start, broadcast=broadcast
    )
    return Algorithm(
        always(phase),
        client_memory=("m", "v", "residual"),
        server_memory=("residual",),
        state=("w",),
    )


def quantized(target: Tensor, bits: int) -> tuple[Parts, Tensor]:
    """Return every coordinate in b bits, and the residual."""
    coder = Linear(bits, block=None, float64_scales=target.dtype.itemsize > 4)
    (part,) = dense({"w": target}, coder)
    return (part,), residual_after(target, part, "w")
