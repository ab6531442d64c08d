"""Layers with the batch innermost compute what torch's own do."""

import copy

import pytest
import torch
from torch import nn

from fedsift.engine.batchlast import BatchLastConv2d, BatchLastMaxPool2d, batch_last

CASES = {
    "one channel": (nn.Conv2d(1, 10, 5), (6, 1, 28, 28)),
    "more channels": (nn.Conv2d(10, 20, 5), (6, 10, 12, 12)),
    "padded": (nn.Conv2d(3, 6, (5, 7), padding=(2, 1)), (4, 3, 9, 11)),
    "no bias": (nn.Conv2d(2, 3, 5, bias=False), (3, 2, 8, 7)),
    "one sample": (nn.Conv2d(2, 3, 5), (1, 2, 8, 8)),
}


def outcome(model, x):
    """The output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_the_same(name):
    layer, shape = CASES[name]
    plain = nn.Sequential(layer, nn.MaxPool2d(2), nn.ReLU()).double()
    fast = copy.deepcopy(plain)
    assert batch_last(fast)
    x = torch.randn(shape, dtype=torch.float64)
    for ours, theirs in zip(outcome(fast, x), outcome(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_of_equal_pixels_the_first_has_the_gradient():
    x = torch.randint(0, 3, (7, 2, 9, 6)).double()
    inner = x.permute(2, 1, 3, 0).contiguous().permute(3, 1, 0, 2)
    fast = nn.MaxPool2d(2)
    fast.__class__ = BatchLastMaxPool2d
    for ours, theirs in zip(outcome(fast, inner), outcome(nn.MaxPool2d(2), x), strict=True):
        assert torch.equal(ours, theirs)


def test_single_images_are_taken_too():
    plain = nn.Sequential(nn.Conv2d(1, 3, 5), nn.MaxPool2d(2))
    fast = copy.deepcopy(plain)
    batch_last(fast)
    assert isinstance(fast[0], BatchLastConv2d)
    assert torch.equal(fast(torch.ones(1, 9, 9)), plain(torch.ones(1, 9, 9)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 3),
        nn.Conv2d(3, 64, 5),
        nn.Conv2d(3, 10, 3),
        nn.Conv2d(3, 10, 5, stride=2),
        nn.Conv2d(3, 10, 5, dilation=2),
        nn.Conv2d(2, 10, 5, groups=2),
        nn.Conv2d(3, 10, 5, padding="same"),
        nn.Conv2d(3, 10, 5, padding=2, padding_mode="reflect"),
        nn.Sequential(nn.Conv2d(3, 10, 5), nn.Conv2d(10, 10, 3)),
    ],
    ids=str,
)
def test_other_models_are_left_alone(layer):
    before = [type(module) for module in layer.modules()]
    assert not batch_last(layer)
    assert [type(module) for module in layer.modules()] == before
