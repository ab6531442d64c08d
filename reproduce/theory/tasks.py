"""The tasks on which the theory is tested, and the arguments that select them."""

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
    """A federation of a data set, or of a random part of it, with the full test set."""
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
"""20 clients with all of digits, 10 clients with 2,000 images of Fashion-MNIST, and 20 clients with
4,000 images of CIFAR-10."""
COMPARED = {
    **TASKS,
    "vgg11-cifar10": lambda: cifar10("vgg11", 4, 400),
    "resnet18-cifar10": lambda: cifar10("resnet18", 4, 400),
}
"""The same, but 4 clients with 400 images for the two large networks, as every client's weights and
gradients are stored after each step."""
SMALL = "digits-iid,digits-dirichlet,fashion-mnist-cnn"
"""The tasks that take minutes on one core; the large networks need a GPU."""


def arguments(about: str) -> Namespace:
    """Parse the tasks, the device and the folder of the tables."""
    parser = ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--tasks", default=SMALL, help=f"from {','.join(TASKS)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the tables")
    parsed = parser.parse_args()
    parsed.tasks = parsed.tasks.split(",")
    if unknown := set(parsed.tasks) - set(TASKS):
        parser.error(f"there is no task {', '.join(unknown)}; choose from {', '.join(TASKS)}")
    torch.backends.cudnn.allow_tf32 = False  # TF32 would hide deviations of 1e-3
    return parsed


def moved_to(device: str, whole: Task) -> Task:
    """The same task with its tensors on a device."""
    clients = [(x.to(device), y.to(device)) for x, y in whole.clients]
    return replace(whole, model=whole.model.to(device), clients=clients, test=None)


def origin(whole: Task) -> tuple[object, ...]:
    """The origin of a row: images, seed, commit and device."""
    x = whole.clients[0][0]
    device = torch.cuda.get_device_name() if x.is_cuda else "cpu"
    return sum(len(y) for _, y in whole.clients), whole.seed, COMMIT, device


ORIGIN = ("images", "seed", "commit", "device")
COMMIT = commit()
"""The commit at the start, as the tables written later are not changes of the code."""
