"""Live augmentation and batch normalization: digits that were written elsewhere on the page.

The clients' digits are centered, those of the test set are shifted. Each client is a torch
``Dataset`` that moves every image at random when it is fetched, again at every use. The running
statistics of the BatchNorm layers are averaged, and count in the traffic.
``python examples/augmentation.py`` draws ``augmentation.png``.
"""

import sys

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import Dataset

import fedsift
from fedsift import algorithms, data


def shifted(image):
    """Move an image by up to two pixels in each direction."""
    down, right = torch.randint(-2, 3, (2,)).tolist()
    return image.roll((down, right), (-2, -1))


class Shifted(Dataset):
    """Images that are somewhere else at every use."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return shifted(self.x[row]), self.y[row]


def network():
    """Return a small convolutional network with batch normalization."""
    layers = []
    for before, after in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def train(rounds=20):
    """Train with and without augmentation, from the same initial weights."""
    torch.manual_seed(0)
    model, digits = network(), data.load("digits")
    test = torch.stack([shifted(image) for image in digits.test[0]]), digits.test[1]
    parts = data.dirichlet(digits.labels, clients=6, seed=0, theta=1.0)
    fixed = data.split(digits.train, parts)
    moving = [Shifted(x, y) for x, y in fixed]
    method = algorithms.fedadam_ssm(density=0.1, local_steps=10, lr=3e-3)
    return {
        name: fedsift.simulate(model, clients, test, method, rounds, buffers="average")
        for name, clients in {"fixed images": fixed, "moved at every use": moving}.items()
    }


def draw(results, path):
    """Draw an image at five uses, and the accuracy with and without augmentation."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", width_ratios=(1, 2))
    digit = data.load("digits").train[0][0]
    uses = torch.cat([torch.cat([shifted(digit)[0] for _ in range(3)], 1) for _ in range(3)])
    axes[0].imshow(uses.numpy(), cmap="gray_r")
    axes[0].set(title="one image, nine uses", xticks=[], yticks=[])
    for name, result in results.items():
        axes[1].plot([100 * record["accuracy"] for record in result.history], label=name)
    axes[1].set(xlabel="round", ylabel="accuracy on moved digits (%)")
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    draw(train(), sys.argv[1] if len(sys.argv) > 1 else "augmentation.png")
