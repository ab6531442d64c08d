"""Layers with the batch innermost compute what torch's own do."""

import copy

import pytest
import torch
from torch import nn

from fedsift.engine.client import Trainer
from fedsift.engine.cpu import native
from fedsift.engine.cpu.batch_last import (
    BatchLastConv2d,
    BatchLastConvPool2d,
    BatchLastMaxPool2d,
    use_batch_last,
)
from fedsift.task import Task
from fedsift.vector import Layout

needs_compiler = pytest.mark.skipif(native.load() is None, reason="needs a C compiler")

CONVOLUTIONS = {
    "one channel": (nn.Conv2d(1, 10, 5), (64, 1, 28, 28)),
    "more channels, not a whole number of vectors": (nn.Conv2d(10, 20, 5), (37, 10, 12, 12)),
    "just one vector": (nn.Conv2d(2, 17, 3), (16, 2, 7, 6)),
    "padded": (nn.Conv2d(3, 6, (5, 7), padding=(2, 1)), (20, 3, 9, 11)),
    "no bias": (nn.Conv2d(2, 3, 5, bias=False), (33, 2, 8, 7)),
    "one pixel": (nn.Conv2d(4, 13, 1), (24, 4, 5, 5)),
    "a whole test chunk": (nn.Conv2d(1, 4, 3), (1000, 1, 8, 8)),
    "too few samples": (nn.Conv2d(2, 3, 5), (3, 2, 8, 8)),
    "one sample": (nn.Conv2d(2, 3, 5), (1, 2, 8, 8)),
}
FOLLOWED = {
    "by nothing": lambda: [nn.Identity()],
    "by a pool": lambda: [nn.MaxPool2d(2)],
    "by a pool and a ReLU": lambda: [nn.MaxPool2d(2), nn.ReLU()],
    "by a ReLU and a pool": lambda: [nn.ReLU(), nn.MaxPool2d(2)],
    "by two pools": lambda: [nn.MaxPool2d(2), nn.MaxPool2d(2)],
    "by a pool further on": lambda: [nn.Tanh(), nn.MaxPool2d(2)],
    "by a pool of another kind": lambda: [nn.MaxPool2d(3), nn.ReLU()],
}


def outcome(model, x, wants_input=True):
    """The output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_(wants_input)
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    wanted = [*([x] if wants_input else []), *model.parameters()]
    return [y, *torch.autograd.grad((y * weights).sum(), wanted)]


def pair(*layers):
    plain = nn.Sequential(*layers)
    fast = copy.deepcopy(plain)
    assert use_batch_last(fast)
    return fast, plain


def same(fast, plain, x, **options):
    for ours, theirs in zip(outcome(fast, x, **options), outcome(plain, x, **options), strict=True):
        largest = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * largest)


@needs_compiler
@pytest.mark.parametrize("wants_input", [True, False])
@pytest.mark.parametrize("followed", FOLLOWED)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_model_with_batch_last_layers_computes_the_same(name, followed, wants_input):
    layer, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)  # with other weights, rounding may decide which pixel of a pool is largest
    layer.reset_parameters()
    if followed == "by two pools" and min(shape[2:]) < 8:
        shape = (*shape[:2], 11, 11)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    same(*pair(layer, *FOLLOWED[followed]()), x, wants_input=wants_input)


@needs_compiler
def test_convolutions_are_fused_with_pools_and_relus():
    fast, _ = pair(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Tanh(),
        nn.MaxPool2d(2),
    )  # fmt: skip
    kinds = [type(layer).__name__ for layer in fast]
    assert kinds == [
        "BatchLastConvPool2d", "Identity", "Identity", "BatchLastConv2d", "ReLU", "Tanh",
        "BatchLastMaxPool2d",
    ]  # fmt: skip


def in_batch_last_order(x):
    return x.permute(2, 1, 3, 0).contiguous().permute(3, 1, 0, 2)


@needs_compiler
def test_the_first_of_equal_pixels_gets_the_gradient():
    x = torch.randint(0, 3, (23, 2, 9, 6)).float()
    fast = BatchLastMaxPool2d(nn.MaxPool2d(2))
    ours, theirs = outcome(fast, in_batch_last_order(x)), outcome(nn.MaxPool2d(2), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@needs_compiler
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("column", [0, 1])
def test_a_pool_propagates_nan(row, column):
    """Or a training that diverged would go unnoticed."""
    x = torch.randn(16, 1, 2, 2)
    x[3, 0, row, column] = torch.nan
    fast, _ = pair(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2), nn.ReLU())
    assert fast(x).isnan().flatten().nonzero().tolist() == [[3]]


@needs_compiler
def test_single_images_are_accepted():
    fast, plain = pair(nn.Conv2d(1, 3, 5), nn.MaxPool2d(2))
    assert isinstance(fast[0], BatchLastConvPool2d)
    assert torch.equal(fast(torch.ones(1, 9, 9)), plain(torch.ones(1, 9, 9)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 3),
        nn.Conv2d(3, 65, 5),
        nn.Conv2d(65, 3, 5),
        nn.Conv2d(3, 10, 5, stride=2),
        nn.Conv2d(3, 10, 5, dilation=2),
        nn.Conv2d(2, 10, 5, groups=2),
        nn.Conv2d(3, 10, 5, padding="same"),
        nn.Conv2d(3, 10, 5, padding=2, padding_mode="reflect"),
        nn.Conv2d(3, 10, 5).double(),
        nn.Sequential(nn.Conv2d(3, 10, 5), nn.Conv2d(10, 100, 3)),
    ],
    ids=str,
)
def test_unsupported_models_are_left_unchanged(layer):
    model = nn.Sequential(layer)
    before = [type(module) for module in model.modules()]
    assert not use_batch_last(model)
    assert [type(module) for module in model.modules()] == before


def test_a_model_with_hooks_is_left_unchanged():
    model = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2))
    model[0].register_forward_hook(lambda layer, x, y: None)
    assert not use_batch_last(model)


def test_a_convolution_outside_a_sequence_is_left_unchanged():
    """What follows it is not known: a pool by function would be slow."""
    model = nn.ModuleList([nn.Conv2d(1, 10, 5)])
    assert not use_batch_last(model)
    assert not isinstance(model[0], BatchLastConv2d)


@needs_compiler
def test_a_layer_may_have_several_places():
    """Or a ReLU that a convolution does in passing would be missing where it is used again."""
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    layers = nn.Conv2d(1, 3, 5), pool, relu, nn.Tanh(), pool, nn.Conv2d(3, 4, 1), relu
    same(*pair(*layers), torch.randn(20, 1, 12, 12))


def test_a_convolution_with_two_places_is_left_unchanged():
    layer = nn.Conv2d(1, 1, 3, padding=1)
    assert not use_batch_last(nn.Sequential(layer, nn.MaxPool2d(2), layer))


WRONG = {
    "too many channels": (nn.Conv2d(1, 4, 3), (16, 3, 8, 8)),
    "too few channels": (nn.Conv2d(3, 4, 3), (16, 1, 8, 8)),
    "a kernel larger than the image": (nn.Conv2d(1, 4, 5), (16, 1, 4, 8)),
}


@pytest.mark.parametrize("followed", ["by nothing", "by a pool and a ReLU"])
@pytest.mark.parametrize("name", WRONG)
def test_images_of_the_wrong_shape_raise_pytorchs_error(name, followed):
    """The C functions check no bounds: they must not see such images."""
    layer, shape = WRONG[name]
    features = 144 if followed == "by nothing" else 36
    layers = [layer, *FOLLOWED[followed](), nn.Flatten(), nn.Linear(features, 2)]
    model, x, y = nn.Sequential(*layers), torch.randn(shape), torch.zeros(16, dtype=torch.int64)
    with pytest.raises(RuntimeError) as wanted:
        copy.deepcopy(model)(x)
    task = Task(model, nn.functional.cross_entropy, [(x, y)], (x, y), None, 0, Layout.of(model))
    trainer = Trainer(task)
    with pytest.raises(RuntimeError) as found:
        trainer.differentiate(trainer.w.clone(), x, y)
    assert str(found.value) == str(wanted.value)
    with pytest.raises(RuntimeError):
        trainer.score(trainer.w.clone(), 0)


@needs_compiler
def test_images_too_small_for_a_pool_raise_pytorchs_error():
    fast, _ = pair(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2))
    with pytest.raises(RuntimeError, match="too small"):
        fast(torch.randn(16, 1, 3, 8))
    fast, _ = pair(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2))
    with pytest.raises(RuntimeError, match="too small"):
        fast(torch.randn(16, 1, 3, 8))


def test_without_a_compiler_torch_does_the_work(fresh_kernels, monkeypatch):
    monkeypatch.setenv("CC", "there-is-no-such-compiler")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randn(20, 1, 4, 4), torch.zeros(20, dtype=torch.int64)
    task = Task(model, nn.functional.cross_entropy, [(x, y)], None, None, 0, Layout.of(model))
    trainer = Trainer(task)
    assert native.load() is None
    assert not trainer.is_batch_last
    trainer.differentiate(trainer.w.clone(), x, y)
    assert float(trainer.gradient.norm()) > 0


@needs_compiler
def test_every_width_of_vectors_computes_the_same(narrow_vectors):
    for layer, shape in CONVOLUTIONS.values():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        same(*pair(layer, nn.MaxPool2d(2), nn.ReLU()), x)
        same(*pair(layer, nn.Tanh(), nn.MaxPool2d(2)), x)
