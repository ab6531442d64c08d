"""The bits of a run on the CPU, recorded at commit 4cde729: a redesign must not change them."""

import hashlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedsift
from fedsift import data, models

PROBE = "024b892ed39e534a"
RECORDED = {
    "fedadam-ssm": "c4f068bc0b03ae0f",
    "fedadam": "b18b8d4d635d3902",
    "sift": "38b00679e15e012e",
}


def digest(*tensors: Tensor) -> str:
    content = b"".join(x.detach().contiguous().numpy().tobytes() for x in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def probe() -> str:
    """What this processor and this PyTorch make of a fixed computation without fedsift."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1, 8, 8, generator=draw)
    weight = torch.randn(10, 1, 3, 3, generator=draw, requires_grad=True)
    output = F.conv2d(x, weight).flatten(1) @ torch.randn(360, 10, generator=draw)
    loss = F.cross_entropy(output / 100, torch.arange(64) % 10)
    loss.backward()
    assert weight.grad is not None
    step = torch.add(weight, weight.grad / (weight.grad.square() + 1e-6).sqrt(), alpha=-1e-3)
    return digest(output, loss, weight.grad, step)


def run(name: str, model: str, shape: tuple[int, ...]) -> str:
    digits = data.load("digits")
    x, y = digits.train
    shares = data.dirichlet(y.numpy(), clients=5, seed=0, theta=0.5)
    result = fedsift.simulate(
        models.build(model, shape, seed=0),
        [(x[rows], y[rows]) for rows in shares],
        digits.test,
        fedsift.algorithms.find(name)(local_steps=5),
        rounds=6,
        batch_size=32,
    )
    traffic = torch.tensor([result.history[-1][k] for k in ("uplink_bytes", "downlink_bytes")])
    return digest(*result.state, result.weights, traffic)


@pytest.mark.parametrize("name", RECORDED)
def test_a_run_has_the_recorded_bits(name: str) -> None:
    if probe() != PROBE:
        pytest.skip("the bits were recorded on another kind of processor, or with another PyTorch")
    shape = data.load("digits").shape
    assert run(name, "small-cnn", shape) == RECORDED[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(probe())
    for each in RECORDED:
        print(each, run(each, "small-cnn", data.load("digits").shape))
