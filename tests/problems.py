"""Small convex problems whose gradients are known in closed form, for torch and for NumPy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ridge:
    """Least squares with a different linear map on each client: f_n(w) = mean (X_n w − y_n)²."""

    clients: list[tuple[Tensor, Tensor]]
    w0: Tensor

    @property
    def model(self) -> nn.Module:
        model = nn.Linear(len(self.w0), 1, bias=False, dtype=self.w0.dtype)
        with torch.no_grad():
            model.weight.copy_(self.w0[None])
        return model

    @property
    def gradients(self) -> list[Callable[[Array], Array]]:
        return [gradient_of(x.numpy(), y.numpy()[:, 0]) for x, y in self.clients]

    @property
    def sizes(self) -> list[float]:
        return [float(len(x)) for x, _ in self.clients]


def gradient_of(x: Array, y: Array) -> Callable[[Array], Array]:
    return lambda w: 2 * x.T @ (x @ w - y) / len(x)


def ridge(
    seed: int,
    clients: int = 4,
    d: int = 12,
    alike: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Ridge:
    """A random problem; local sets differ in size unless the clients are alike."""
    draw = np.random.default_rng(seed)

    def local() -> tuple[Tensor, Tensor]:
        n = 8 if alike else int(draw.integers(3, 20))
        x = draw.normal(size=(n, d)) * draw.uniform(0.5, 2.0, size=d)
        return torch.tensor(x, dtype=dtype), torch.tensor(draw.normal(size=(n, 1)), dtype=dtype)

    data = [local()] * clients if alike else [local() for _ in range(clients)]
    return Ridge(data, torch.tensor(draw.normal(size=d), dtype=dtype))
