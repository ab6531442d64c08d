"""The tasks on which the theory is tried, and how its scripts are told which of them to try."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import torch
from tables import HERE
from torch.nn.functional import cross_entropy

from fedsift.data import load, partition_indices
from fedsift.models import build, default_model
from fedsift.runs.run import commit
from fedsift.seeding import stream
from fedsift.task import Task
from fedsift.vector import Layout


def task(
    dataset: str,
    partition: str,
    clients: int,
    *,
    batch_size: int,
    model: str = "",
    samples: int = 0,
    seed: int = 0,
) -> Task:
    """A federation of a data set, or of a random part of it; the test set stays whole."""
    data = load(dataset)
    x, y = data.train
    if samples:
        rows = stream(seed, "subset").permutation(len(x))[:samples]
        x, y = x[rows], y[rows]
    parts = partition_indices(partition, y.numpy(), clients, seed, theta=0.1)
    network = build(model or default_model(data.shape), data.shape, seed)
    local = [(x[part], y[part]) for part in parts]
    return Task(network, cross_entropy, local, data.test, batch_size, seed, Layout.of(network))


def cifar10(model: str, clients: int, samples: int) -> Task:
    """A network with millions of parameters on some of CIFAR-10."""
    return task("cifar-10", "iid", clients, batch_size=64, model=model, samples=samples)


TASKS = {
    "digits-iid": lambda: task("digits", "iid", 20, batch_size=64),
    "digits-dirichlet": lambda: task("digits", "dirichlet", 20, batch_size=64),
    "fashion-mnist-cnn": lambda: task("fashion-mnist", "iid", 10, batch_size=64, samples=2000),
    "vgg11-cifar10": lambda: cifar10("vgg11", 20, 4000),
    "resnet18-cifar10": lambda: cifar10("resnet18", 20, 4000),
}
"""20 clients with all of digits; 10 clients with 2,000 images of Fashion-MNIST; 20 clients with
4,000 images of CIFAR-10."""
WATCHED = {
    **TASKS,
    "vgg11-cifar10": lambda: cifar10("vgg11", 4, 400),
    "resnet18-cifar10": lambda: cifar10("resnet18", 4, 400),
}
"""The same, but for the two large networks 4 clients with 400 images: every client's weights and
gradients are kept after every step."""
SMALL = "digits-iid,digits-dirichlet,fashion-mnist-cnn"
"""What one core does in minutes; the large networks want a GPU."""


def arguments(about: str) -> Namespace:
    """Which tasks, on which device, and where the tables go."""
    parser = ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--tasks", default=SMALL, help=f"some of {','.join(TASKS)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the tables")
    given = parser.parse_args()
    given.tasks = given.tasks.split(",")
    if unknown := set(given.tasks) - set(TASKS):
        parser.error(f"there is no task {', '.join(unknown)}; choose some of {', '.join(TASKS)}")
    torch.backends.cudnn.allow_tf32 = False  # a deviation of 1e-3 is what we look for
    return given


def on(device: str, whole: Task) -> Task:
    """The same task with its tensors on a device."""
    clients = [(x.to(device), y.to(device)) for x, y in whole.clients]
    return replace(whole, model=whole.model.to(device), clients=clients, test=None)


def made(whole: Task) -> tuple[object, ...]:
    """What a row's figures come from: images, seed, commit, device."""
    x = whole.clients[0][0]
    device = torch.cuda.get_device_name() if x.is_cuda else "cpu"
    return sum(len(y) for _, y in whole.clients), whole.seed, COMMIT, device


MADE = ("images", "seed", "commit", "device")
COMMIT = commit()
"""As the script begins: the tables that it writes are no change of the code."""
