"""The layers that run all clients at once, compared with PyTorch's on one client at a time.

Where there is no GPU, Triton interprets the kernels: slow, but the same code.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsift import models
from fedsift.engine.client import Trainer
from fedsift.engine.gpu.gradients import LayerGradients, client_losses
from fedsift.engine.gpu.stacked_task import StackedTask
from fedsift.task import Task, statistics_of
from fedsift.vector import Layout

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to test")

from fedsift.engine.gpu.layers import (
    StackedConvolution,
    StackedGroupNorm,
    StackedMaxPool,
    Window,
    cross_entropy,
)
from fedsift.engine.gpu.network import LAYERS, StackedNetwork
from fedsift.engine.gpu.unsupported import UnsupportedModel
from fedsift.engine.gpu.weight import Weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = "tf32x3" if DEVICE == "cuda" else "ieee"
CLIENTS = 2


@pytest.fixture(autouse=True)
def _exact():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def weight(value: torch.Tensor) -> Weight:
    return Weight(value, value, torch.full_like(value, float("nan")))


def anchor() -> torch.Tensor:
    return torch.zeros((), device=DEVICE, requires_grad=True)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-6 * theirs.norm())


def reference(x, parameters, layer):
    """A layer's output by torch in float64, and the leaves to read gradients from."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    pictures = leaves[0].permute(0, 1, 4, 2, 3)
    each = [layer(pictures[n], *(p[n] for p in leaves[1:])) for n in range(CLIENTS)]
    return torch.stack(each).permute(0, 1, 3, 4, 2), leaves


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("batch", "size", "inputs", "outputs", "side", "stride", "padding"),
    [
        (3, 9, 1, 10, 5, 1, 0),  # the CNN's first layer: few channels, no padding
        (2, 6, 10, 20, 5, 1, 0),
        (3, 5, 3, 64, 3, 1, 1),  # VGG-11's first
        (4, 4, 32, 48, 3, 1, 1),  # channels in whole blocks
        (4, 4, 64, 64, 3, 2, 1),  # a stride, as ResNet-18 has it
        (4, 4, 64, 128, 1, 2, 0),
        (8, 1, 320, 50, 1, 1, 0),  # a linear layer
    ],
)
def test_a_convolution_and_its_gradients(batch, size, inputs, outputs, side, stride, padding, relu):
    torch.manual_seed(0)
    x = rand(CLIENTS, batch, size, size, inputs).requires_grad_()
    w, b = rand(CLIENTS, outputs, side, side, inputs) / side, rand(CLIENTS, outputs)
    ours_w, ours_b = weight(w), weight(b)
    y = StackedConvolution.apply(
        anchor(), x, ours_w, ours_b, Window(side, stride, padding), relu, EXACT
    )

    def layer(x, w, b):
        y = functional.conv2d(x, w.permute(0, 3, 1, 2), b, stride, padding)
        return y.relu() if relu else y

    expected, leaves = reference(x, (w, b), layer)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope.double())
    assert close(y, expected)
    for ours, leaf in zip((x.grad, ours_w.gradient, ours_b.gradient), leaves, strict=True):
        assert close(ours, leaf.grad)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("size", [4, 5])
def test_pooling_gives_ties_to_the_first(size, relu):
    torch.manual_seed(0)
    x = rand(CLIENTS, 3, size, size, 7).round().requires_grad_()
    y = StackedMaxPool.apply(x, 2, relu)

    def layer(x):
        y = functional.max_pool2d(x, 2)
        return y.relu() if relu else y

    expected, (leaf,) = reference(x, (), layer)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope.double())
    assert torch.equal(y.double(), expected)
    assert torch.equal(x.grad.double(), leaf.grad)


@pytest.mark.parametrize("relu", [False, True])
def test_group_normalization_and_its_gradients(relu):
    torch.manual_seed(0)
    x = (3 + rand(CLIENTS, 3, 5, 5, 64)).requires_grad_()
    scale, bias = rand(CLIENTS, 64), rand(CLIENTS, 64)
    ours_scale, ours_bias = weight(scale), weight(bias)
    y = StackedGroupNorm.apply(anchor(), x, ours_scale, ours_bias, 32, 1e-5, relu)

    def layer(x, scale, bias):
        y = functional.group_norm(x, 32, scale, bias, 1e-5)
        return y.relu() if relu else y

    expected, leaves = reference(x, (scale, bias), layer)
    slope = torch.randn_like(y)
    y.backward(slope)
    expected.backward(slope.double())
    assert close(y, expected)
    for ours, leaf in zip((x.grad, ours_scale.gradient, ours_bias.gradient), leaves, strict=True):
        assert float((ours - leaf.grad).norm() / leaf.grad.norm()) < 1e-5


def test_cross_entropy_and_its_gradient():
    torch.manual_seed(0)
    output = (5 * rand(CLIENTS, 6, 10)).requires_grad_()
    labels = torch.randint(0, 10, (CLIENTS, 6), device=DEVICE)
    losses = torch.ones(CLIENTS, device=DEVICE)
    slope = cross_entropy(output.detach(), labels, losses)
    expected = client_losses(functional.cross_entropy, output, labels)
    expected.sum().backward()
    assert torch.allclose(losses, 1 + expected, rtol=1e-6)
    assert close(slope, output.grad)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16))

    def forward(self, x):
        return functional.relu(self.body(x) + x)


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "shape", "loss"),
    [
        (models.convnets.small_cnn, (1, 8, 8), functional.cross_entropy),
        (residual, (1, 6, 6), lambda output, labels: functional.cross_entropy(output, labels)),
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 10)), (5,),
         functional.cross_entropy),
    ],
)  # fmt: skip
def test_a_network_has_the_gradients_of_its_model(make, shape, loss):
    torch.manual_seed(0)
    model = make().to(DEVICE)
    layout = Layout.of(model)
    x, y = rand(6, *shape), torch.randint(0, 4, (6,), device=DEVICE)
    task = Task(model, loss, [(x, y)], None, 2, 0, layout)
    network = StackedNetwork(model, layout, EXACT)
    gradients = LayerGradients(StackedTask(task, x, y, "fp32"), network, CLIENTS)
    start = torch.stack([layout.read(model), 1.1 * layout.read(model)])
    gradients.pack(start, gradients.buffers.x.w)
    rows = torch.tensor([[0, 3], [5, 1]], device=DEVICE)
    gradients.compute(rows)
    assert torch.equal(gradients.unpack(gradients.buffers.x.w), start)
    for n, ours in enumerate(gradients.unpack(gradients.buffers.gradient)):
        trainer = Trainer(task)
        value = trainer.differentiate(start[n], x[rows[n]], y[rows[n]])
        expected = trainer.gradient
        assert float((ours - expected).norm() / expected.norm()) < 2e-6
        assert float(gradients.buffers.loss[n]) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("make", [models.convnets.small_cnn, residual])
def test_a_network_has_the_output_of_its_model(make):
    torch.manual_seed(0)
    model = make().to(DEVICE)
    layout = Layout.of(model)
    x, y = rand(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    task = Task(model, functional.cross_entropy, [(x, y)], None, 5, 0, layout)
    task = StackedTask(task, x, y, "fp32")
    with torch.no_grad():
        network = StackedNetwork(model, layout, EXACT)
        assert close(task.network_output(network, layout.read(model), x), model(x))


def normalized(momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    """A network with both kinds of batch normalization, one of them followed by a ReLU."""
    features = nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6, momentum=momentum), nn.ReLU()
    head = nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=momentum, affine=affine), nn.Linear(4, 3)
    plain = nn.BatchNorm1d(3, track_running_stats=False)
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head, plain)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
def test_batch_normalization_has_its_gradients_and_statistics(momentum, affine, is_frozen):
    torch.manual_seed(0)
    model = normalized(momentum, affine).to(DEVICE)
    layout = Layout.of(model)
    layout = layout if is_frozen else layout.with_buffers(model, statistics_of(model))
    x, y = 1 + 2 * rand(8, 1, 6, 6), torch.randint(0, 3, (8,), device=DEVICE)
    task = Task(model, functional.cross_entropy, [(x, y)], None, 4, 0, layout, is_frozen=is_frozen)
    stacked = StackedTask(task, x, y, "fp32", ("w",) if is_frozen else ("w", "b"))
    network = StackedNetwork(model, layout, EXACT, is_frozen)
    gradients = LayerGradients(stacked, network, CLIENTS)
    start = layout.read(model)
    w, b = layout.split(start)
    gradients.pack(torch.stack([w, 1.1 * w]), gradients.buffers.x.w)
    gradients.buffers.b.copy_(b)
    rows = torch.tensor([[0, 3, 4, 7], [5, 1, 2, 6]], device=DEVICE)
    for _ in range(2):
        gradients.compute(rows)
    for n, ours in enumerate(gradients.unpack(gradients.buffers.gradient)):
        trainer = Trainer(task)
        task.train_mode(trainer.model)
        for _ in range(2):
            trainer.differentiate((1 + 0.1 * n) * w, x[rows[n]], y[rows[n]])
        assert float((ours - trainer.gradient).norm() / trainer.gradient.norm()) < 1e-4
        expected = layout.read_buffers(trainer.model)
        torch.testing.assert_close(gradients.buffers.b[n].cpu(), expected.cpu())
        values = torch.cat([(1 + 0.1 * n) * w, gradients.buffers.b[n]])
        with torch.no_grad():
            output = stacked.network_output(network, values, x)
            expected = trainer.model.eval()(x)
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


def shares_a_layer() -> nn.Module:
    same = nn.Linear(4, 4)
    return nn.Sequential(same, nn.ReLU(), same)


class Half(nn.Module):
    def forward(self, x):
        return torch.add(x, x, alpha=0.5)


class Overwriting(nn.Module):
    def forward(self, x):
        return functional.relu(x, inplace=True) + x


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda layer, x, y: 2 * y)
    return model


class Curious(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)),
        lambda: nn.Sequential(nn.Linear(4, 4), Curious()),
        lambda: nn.Sequential(nn.Linear(4, 4), Half()),
        lambda: nn.Sequential(nn.Linear(4, 4), Overwriting()),
        hooked,
        shares_a_layer,
        models.transformer.vit_tiny,
    ],
)
def test_unsupported_models_are_refused(make):
    model = make()
    with pytest.raises(UnsupportedModel):
        StackedNetwork(model, Layout.of(model), EXACT)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 4, 3), (CLIENTS, 5, 8, 8, 3)),
        (nn.Linear(7, 4), (CLIENTS, 5, 6)),
        (nn.GroupNorm(2, 4), (CLIENTS, 5, 8, 8, 8)),
    ],
)
def test_inputs_of_the_wrong_shape_are_refused(layer, shape):
    """The kernels check no bounds. Other models run on PyTorch, which raises its error."""
    with pytest.raises(UnsupportedModel):
        LAYERS[type(layer)](None, layer, torch.ones(shape))
