"""The tasks on which the theory is tried, small enough for one core."""

from torch.nn.functional import cross_entropy

from fedsift.data import deal, load
from fedsift.engine.task import Task
from fedsift.models import build, default_model
from fedsift.seeding import stream
from fedsift.vector import Layout


def task(
    dataset: str, partition: str, clients: int, *, batch_size: int, samples: int = 0, seed: int = 0
) -> Task:
    """A federation of a data set, or of a random part of it; the test set stays whole."""
    data = load(dataset)
    x, y = data.train
    if samples:
        rows = stream(seed, "subset").permutation(len(x))[:samples]
        x, y = x[rows], y[rows]
    parts = deal(partition, y.numpy(), clients, seed, theta=0.1)
    model = build(default_model(data.shape), data.shape, seed)
    local = [(x[part], y[part]) for part in parts]
    return Task(model, cross_entropy, local, data.test, batch_size, seed, Layout.of(model))


TASKS = {
    "digits-iid": lambda: task("digits", "iid", 20, batch_size=64),
    "digits-dirichlet": lambda: task("digits", "dirichlet", 20, batch_size=64),
    "fashion-mnist-cnn": lambda: task("fashion-mnist", "iid", 10, batch_size=64, samples=2000),
}
"""20 clients with all of digits; 10 clients with 2,000 images of Fashion-MNIST."""
