"""Any method whose clients send ΔW in full, with few coordinates in few bits instead, both ways.

These are the pieces of :func:`~fedsift.algorithms.sift.sift`, around another method:

- A client adds its residual (the unsent part of earlier updates, decayed every round) to ΔW and
  sends the largest coordinates of the sum in a few bits each.
- ΔM and ΔV, if the method sends them, follow under the same mask, without residuals.
- The server does the same with what the method would broadcast. Its residuals do not decay.

The local steps, the memories and the server's optimizer remain those of the method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from fedsift.algorithms.checks import checked_message
from fedsift.algorithms.compression import (
    EXACT,
    DownDensity,
    compress,
    compress_with_residuals,
    residual_name,
    value_bits,
)
from fedsift.algorithms.example_message import SMALLEST, small_context, smallest_message
from fedsift.algorithms.method import Algorithm, Context, LocalUpdate, Memory, Phase, Q
from fedsift.algorithms.registry import wrapper
from fedsift.algorithms.settings import Density, Range, ResidualDecay, Setting
from fedsift.codec.update import (
    PAYLOADS,
    ROLES,
    Part,
    Parts,
    Role,
    accumulate,
    residual_after,
)
from fedsift.codec.values import lossless
from fedsift.errors import ConfigError
from fedsift.selection.masks import num_kept
from fedsift.vector import State

Bits = Annotated[
    int,
    Setting(
        f"Bits per value, of which {EXACT} send it exactly",
        Range(
            f"a whole number from 2 to 8, or {EXACT}",
            lambda x: isinstance(x, int) and (2 <= x <= 8 or x == EXACT),
        ),
    ),
]


@wrapper("compressed")
def compressed(
    algorithm: Algorithm,
    density: Density = 0.01,
    bits: Bits = 4,
    decay: ResidualDecay = 0.95,
    down_density: DownDensity = 0.1,
) -> Algorithm:
    """A method that sends ΔW in full, with its top-k in few bits instead, and error feedback.

    Uplink per client and round: k (bits + log₂ d) bits instead of dq. The downlink has
    ``down_density`` of the coordinates. With ``density=1``, ``down_density=1`` and ``bits=32``, the
    results are those of the method itself.

    >>> from fedsift.algorithms import fedsgd
    >>> compressed(fedsgd(lr=0.1), density=0.05, bits=8)
    compressed_fedsgd(local_steps=30, lr=0.1, density=0.05, bits=8, decay=0.95, down_density=0.1)
    """
    roles = compressible_roles(algorithm)
    residuals = tuple(residual_name(role) for role in roles)

    def compressed_phase(round: int) -> Phase:
        phase = algorithm.phase(round)

        def send(context: Context, update: LocalUpdate, memory: Memory) -> tuple[Parts, Memory]:
            inner = without_vectors(memory, ["residual"])
            parts, kept = checked_message(phase.send(context, update, inner), inner, "send")
            vectors, payloads = dense_vectors(algorithm.name, parts)
            target = vectors.pop("w") + decay * memory["residual"]
            part = compress(target, vectors, num_kept(density, context.d), bits)
            return (part, *payloads), {**kept, "residual": residual_after(target, part, "w")}

        def broadcast(context: Context, mean: State, memory: Memory) -> tuple[Parts, Memory]:
            inner = without_vectors(memory, residuals)
            message = phase.broadcast(context, mean, inner)
            parts, kept = checked_message(message, inner, "broadcast")
            total = summed(parts, mean)
            vectors = {role: total[role][None] for role in roles}
            k = num_kept(down_density, context.d)
            part, left = compress_with_residuals(vectors, memory, k, bits)
            return (part, *payloads_of(parts)), {**kept, **left}

        def paper_bits(d: int) -> float:
            dense = d * Q * len(roles)
            return phase.paper_bits(d) - dense + message_bits(roles, num_kept(density, d), bits, d)

        return replace(phase, send=send, broadcast=broadcast, paper_bits=paper_bits)

    return replace(
        algorithm,
        phase=compressed_phase,
        client_memory=(*algorithm.client_memory, "residual"),
        server_memory=(*algorithm.server_memory, *residuals),
    )


def compressible_roles(algorithm: Algorithm) -> tuple[Role, ...]:
    """Return the vectors that a method's clients send; refuse a method that cannot be compressed.

    What it sends for a model with two parameters shows the form of its messages.
    """
    if "residual" in (*algorithm.client_memory, *algorithm.server_memory):
        raise not_compressible(algorithm.name, "it compresses its updates itself")
    parts = smallest_message(algorithm)
    vectors, _ = dense_vectors(algorithm.name, parts)
    roles = tuple(role for role in ROLES if role in vectors)
    require_same_roles_down(algorithm, parts, roles)
    return roles


def dense_vectors(name: str, parts: Parts) -> tuple[dict[Role, Tensor], Parts]:
    """Return the vectors of a message by role, and its payloads; refuse other messages."""
    vectors: dict[Role, Tensor] = {}
    for part in parts:
        if not is_payload(part):
            if part.indices is not None or not is_exact(part):
                raise not_compressible(name, "it compresses its updates itself")
            vectors |= {role: coded.restore() for role, coded in part.values.items()}
    if "c" in vectors:
        raise not_compressible(name, "the mean of its control variates (C) must be exact")
    if "w" not in vectors:
        raise not_compressible(name, "its clients do not send ΔW")
    return vectors, payloads_of(parts)


def require_same_roles_down(algorithm: Algorithm, up: Parts, roles: Sequence[Role]) -> None:
    """Refuse a method whose server sends vectors that its clients do not send (``up``)."""
    context = small_context(algorithm, SMALLEST)
    mean = algorithm.zero_update(context.layout, context.state.w)
    accumulate(mean, up)
    memory = algorithm.initial_server_memory(context.layout, context.state.w)
    parts, _ = algorithm.phase(1).broadcast(context, mean, memory)
    total = summed(parts, mean)
    for role in total.names:
        if role not in roles and bool(total[role].any()):
            problem = f"its server sends {role.upper()}, which its clients do not send"
            raise not_compressible(algorithm.name, problem)


def not_compressible(name: str, why: str) -> ConfigError:
    """Return the error for a method that cannot be compressed."""
    return ConfigError(f"{name} cannot be compressed: {why}; choose a method that sends ΔW in full")


def summed(parts: Parts, like: State) -> State:
    """Return the vectors of a broadcast, zero where it has no values; payloads are left out."""
    total = like.map(torch.zeros_like)
    accumulate(total, [part for part in parts if not is_payload(part)])
    return total


def payloads_of(parts: Parts) -> Parts:
    """Return the parts of a message that are a method's own payloads."""
    return tuple(part for part in parts if is_payload(part))


def is_payload(part: Part) -> bool:
    """Whether a part holds a method's own payload."""
    return set(part.values) <= PAYLOADS


def is_exact(part: Part) -> bool:
    """Whether a part holds every bit of its values."""
    return all(coded.coder == lossless(coded.dtype) for coded in part.values.values())


def without_vectors(memory: Memory, names: Sequence[str]) -> Memory:
    """Return a memory without some of its vectors."""
    return {name: x for name, x in memory.items() if name not in names}


def message_bits(roles: Sequence[Role], k: int, bits: int, d: int) -> float:
    """Return the bits of k values per vector and of their mask: a bitmap or indices.

    >>> message_bits(["w"], k=10, bits=4, d=1024)
    140.0
    """
    mask = min(d, k * math.log2(d)) if k < d else 0
    return k * sum(value_bits(role, bits) for role in roles) + mask
