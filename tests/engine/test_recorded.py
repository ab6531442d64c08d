"""A network's step that is laid down once computes what autograd does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsift.adam import AdamStep
from fedsift.engine.client import Trainer
from fedsift.engine.cpu import native
from fedsift.engine.cpu.recorded import read_stages
from fedsift.engine.cpu.recorded_convolutions import WinogradConvolution
from fedsift.engine.fused import fused
from fedsift.models import build
from fedsift.task import Task
from fedsift.vector import Layout, State

needs_compiler = pytest.mark.skipif(native.load() is None, reason="needs a C compiler")

NETWORKS = {
    "the paper's CNN": ((1, 28, 28), lambda: build("cnn", (1, 28, 28), seed=0)),
    "padding": ((1, 8, 8), lambda: build("small-cnn", (1, 8, 8), seed=0)),
    "no pool": (
        (2, 7, 9),
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=(1, 2)), nn.ReLU(), nn.Conv2d(5, 3, (2, 3)), nn.ReLU(),
            nn.Flatten(), nn.Linear(162, 4),
        ),
    ),
    "odd images": (
        (3, 11, 13),
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 7, 2), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(14, 4),
        ),
    ),
    "fewer products, two pixels at once": (
        (6, 9, 10),
        lambda: nn.Sequential(
            nn.Conv2d(6, 7, (4, 5)), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(7, 5, 3, padding=1),
            nn.Flatten(), nn.Linear(45, 4),
        ),
    ),
    "fewer products, four pixels at once": (
        (8, 6, 6),
        lambda: nn.Sequential(
            nn.Conv2d(8, 9, 3), nn.ReLU(), nn.Conv2d(9, 7, (2, 5), padding=(1, 2)), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(28, 4),
        ),
    ),
    "no bias": (
        (1, 8, 8),
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(4, 4, 3, bias=False), nn.Flatten(), nn.Linear(4, 4, bias=False),
        ),
    ),
    "sequences in a sequence": (
        (1, 6, 6),
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.Sequential(nn.Flatten()),
            nn.Linear(64, 4),
        ),
    ),
    "linear layers": (
        (1, 5, 6),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 4)),
    ),
    "features": ((7,), lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4))),
    "one ReLU in many places": (
        (1, 6, 6),
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), relu := nn.ReLU(), nn.Flatten(), nn.Linear(64, 9), relu,
            nn.Linear(9, 4),
        ),
    ),
    "one layer": ((7,), lambda: nn.Linear(7, 4)),
    "sentences": ((3, 7), lambda: nn.Sequential(nn.Flatten(), nn.Linear(21, 4))),
}  # fmt: skip


def trainer_of(model, x, y, loss=cross_entropy):
    return Trainer(Task(model, loss, [(x, y)], None, 64, 0, Layout.of(model)))


def samples(shape, size=90):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(size, *shape, generator=draw), torch.randint(4, (size,), generator=draw)
    return x, y


def by_autograd(model, x, y):
    plain = copy.deepcopy(model)
    loss = cross_entropy(plain(x), y)
    loss.backward()
    gradients = [p.grad.flatten() for p in plain.parameters() if p.requires_grad]
    return float(loss.detach()), torch.cat(gradients)


@needs_compiler
@pytest.mark.parametrize("batch", [16, 37, 64, None])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_recorded_step_equals_autograd(name, batch):
    check(name, batch)


@needs_compiler
def test_every_width_of_vectors_computes_the_same(narrow_vectors):
    for name in NETWORKS:
        check(name, 37)


def check(name, batch):
    shape, make = NETWORKS[name]
    torch.manual_seed(0)
    model, (x, y) = make(), samples(shape)
    trainer = trainer_of(model, x, y)
    rows = None if batch is None else torch.randperm(len(x))[:batch]
    assert trainer.recorded(x.shape[1:], batch or len(x))
    trainer.gradient.fill_(torch.nan)  # nothing of what was there before may stay
    loss = trainer.differentiate(trainer.w.clone(), x, y, rows)
    wanted, gradient = by_autograd(model, *((x, y) if rows is None else (x[rows], y[rows])))
    assert loss == pytest.approx(wanted, rel=1e-5)
    largest = float(gradient.abs().max())
    torch.testing.assert_close(trainer.gradient, gradient, rtol=1e-5, atol=1e-5 * largest)


def images(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def frozen():
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 4))
    model[0].weight.requires_grad_(False)
    return model


def tied():
    layer = nn.Linear(7, 7)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(7, 4))


def watched():
    model = nn.Sequential(nn.Linear(7, 4))
    model[0].register_forward_hook(lambda layer, x, y: 2 * y)
    return model


OTHERS = {
    "dropout": ((1, 8, 8), lambda: images(nn.Conv2d(1, 4, 3), nn.Dropout())),
    "another activation": ((1, 8, 8), lambda: images(nn.Conv2d(1, 4, 3), nn.Tanh())),
    "another pool": ((1, 8, 8), lambda: images(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3))),
    "two pools": ((1, 8, 8), lambda: images(nn.Conv2d(1, 4, 3), *2 * [nn.MaxPool2d(2)])),
    "a ReLU at first": ((7,), lambda: nn.Sequential(nn.ReLU(), nn.Linear(7, 4))),
    "a wide convolution": ((1, 8, 8), lambda: images(nn.Conv2d(1, 80, 3))),
    "a wide frame": ((1, 4, 4), lambda: images(nn.Conv2d(1, 2, 1, padding=1))),
    "rows of images": ((1, 4, 7), lambda: images(nn.Linear(7, 4))),
    "a layer of one's own": ((7,), lambda: Doubling(7, 4)),
    "a layer used twice": ((7,), tied),
    "frozen weights": ((7,), frozen),
    "hooks": ((7,), watched),
}


@needs_compiler
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_use_autograd(name):
    shape, make = OTHERS[name]
    x, y = samples(shape)
    model = make().eval()
    model(x)  # lazy layers learn their sizes
    trainer = trainer_of(model, x, y)
    assert trainer.recorded(x.shape[1:], len(x)) is None
    loss, _ = by_autograd(model, x, y)
    assert trainer.differentiate(trainer.w.clone(), x, y) == pytest.approx(loss, rel=1e-5)


def prepared(model):
    layout = Layout.of(model)
    layout.bind(model, layout.read(model), torch.zeros(layout.d, dtype=layout.dtype))
    return model


@needs_compiler
def test_only_float32_cross_entropy_is_recorded():
    assert read_stages(prepared(nn.Linear(7, 4)), cross_entropy)
    assert not read_stages(prepared(nn.Linear(7, 4)), lambda x, y: cross_entropy(x, y))
    assert not read_stages(prepared(nn.Linear(7, 4).double()), cross_entropy)


@needs_compiler
def test_small_batches_use_autograd():
    x, y = samples((7,), size=15)
    trainer = trainer_of(nn.Linear(7, 4), x, y)
    assert trainer.recorded(x.shape[1:], 15) is None
    assert trainer.differentiate(trainer.w.clone(), x, y) > 0


def test_inputs_that_do_not_fit_raise_pytorchs_error():
    x, y = samples((1, 8, 8))
    wrong = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(99, 4))
    trainer = trainer_of(wrong, x, y)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.differentiate(trainer.w.clone(), x, y)


def test_a_label_that_is_not_a_class_raises_pytorchs_error():
    x, y = samples((7,))
    trainer = trainer_of(nn.Linear(7, 4), x, y)
    y[5] = 4
    with pytest.raises(IndexError, match="out of bounds"):
        trainer.differentiate(trainer.w.clone(), x, y)


@pytest.mark.parametrize("missing", [1, 60])
def test_too_few_labels_raise_pytorchs_error(missing):
    x, y = samples((7,))
    trainer = trainer_of(nn.Linear(7, 4), x, y)
    with pytest.raises(ValueError, match="batch_size"):
        trainer.differentiate(trainer.w.clone(), x, y[:-missing])


def test_ignored_labels_are_supported():
    x, y = samples((7,))
    y[:80] = -100
    model = nn.Linear(7, 4)
    trainer = trainer_of(model, x, y)
    loss = trainer.differentiate(trainer.w.clone(), x, y)
    assert loss == pytest.approx(by_autograd(model, x, y)[0])


@needs_compiler
def test_nan_reaches_the_loss_and_the_gradient():
    x, y = samples((7,))
    x[3, 2] = torch.nan
    trainer = trainer_of(nn.Linear(7, 4), x, y)
    assert torch.tensor(trainer.differentiate(trainer.w.clone(), x, y)).isnan()
    assert trainer.gradient.isnan().any()


@needs_compiler
@pytest.mark.parametrize("columns", [8, 6])
@pytest.mark.parametrize("wide", [3, 5])
def test_winograd_convolutions_are_about_as_accurate_as_pytorchs(wide, columns):
    """Against double precision: at most a few times as much as PyTorch's own convolution."""
    layer = nn.Conv2d(16, 20, (3, wide))
    layer.weight.grad, layer.bias.grad = torch.empty_like(layer.weight), torch.empty(20)
    rows = torch.randn(9, 16, columns + wide - 1, 64)
    assert WinogradConvolution.is_faster(layer, rows)
    work = WinogradConvolution(layer, rows)
    y, of_y, of_x = torch.empty(work.shape), torch.randn(work.shape), torch.empty(rows.shape)
    for call in (*work.forward(y), *work.backward(of_y, of_x)):
        call()
    ours = [
        y.permute(3, 1, 0, 2), of_x.permute(3, 1, 0, 2), layer.weight.grad, layer.bias.grad
    ]  # fmt: skip
    x, of_output = rows.permute(3, 1, 0, 2), of_y.permute(3, 1, 0, 2)
    single, double = (of_all(layer, x, of_output, dtype) for dtype in (torch.float, torch.double))
    for mine, theirs, truth in zip(ours, single, double, strict=True):
        assert (mine - truth).norm() < 4 * (theirs - truth).norm()


def of_all(layer, x, of_output, dtype):
    """A convolution's output, and the gradients of all that goes in."""
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, (x, *layer.parameters()), of_output.to(dtype))]


@needs_compiler
def test_the_c_kernel_equals_adam():
    draw = torch.Generator().manual_seed(0)
    w, m, v, gradient = torch.randn(4, 1, 1001, generator=draw)
    x = State(w=w, m=m, v=v.abs())
    step = AdamStep(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3)
    wanted = step(x, gradient)
    fused(step, x.w)(x, gradient, x.w, None)
    for ours, theirs in zip(x, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
