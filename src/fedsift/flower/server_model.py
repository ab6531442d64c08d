"""The model on the server, for methods whose server computes gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedsift.algorithms.method import Algorithm
from fedsift.task import Loss, RemoteClients, Task
from fedsift.task.synthetic import output_shape
from fedsift.vector import Layout


@dataclass(frozen=True)
class ServerModel:
    """The clients' model, the shape of one of its inputs, and the clients' loss, if known."""

    network: nn.Module | None
    input_shape: Sequence[int] | None
    loss: Loss

    def check_fits(self, algorithm: Algorithm) -> None:
        """Refuse a method that needs the model without it."""
        if algorithm.makes_samples and (self.network is None or self.input_shape is None):
            raise ValueError(
                f"the server of {algorithm.name} computes gradients of synthetic samples: pass "
                "network=model, input_shape=(...) and, unless it is cross-entropy, loss="
            )

    def task(
        self, algorithm: Algorithm, layout: Layout, clients: int, batch_size: int | None, seed: int
    ) -> Task:
        """Return what is trained. The server knows the number of clients, but not their data."""
        model = nn.Module() if self.network is None else copy.deepcopy(self.network)
        if self.network is not None:
            check_network(model, layout)
        if self.input_shape is not None and algorithm.makes_samples:
            zeros = torch.zeros(1, *self.input_shape, dtype=layout.dtype)
            shapes = tuple(self.input_shape), output_shape(model, self.loss, zeros)
            layout = layout.with_sample_shapes(shapes)
        layout = algorithm.layout_for(layout)
        return Task(model, self.loss, RemoteClients(clients, {}), None, batch_size, seed, layout)


def check_network(network: nn.Module, layout: Layout) -> None:
    """Refuse a network with other parameters than those that are trained."""
    own = Layout.of(network)
    if (own.names, own.shapes, own.dtype) != (layout.names, layout.shapes, layout.dtype):
        raise ValueError(
            "network has other parameters than initial_arrays: pass "
            "fedsift.flower.arrays_of(network) to start"
        )
