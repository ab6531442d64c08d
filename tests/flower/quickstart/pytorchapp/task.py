"""pytorchapp: the model, the data and the loops, without Flower."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_images():
    """Return the images and labels of all clients, and of the server's test set."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    return TensorDataset(images[300:], labels[300:]), TensorDataset(images[:300], labels[:300])


def load_data(partition_id, num_partitions, batch_size):
    """Return the loaders of one partition: 80 % to train, 20 % to test."""
    rows = slice(partition_id, None, num_partitions)
    whole = TensorDataset(*load_images()[0][rows])
    generator = torch.Generator().manual_seed(42)
    train, test = torch.utils.data.random_split(whole, [0.8, 0.2], generator=generator)
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def load_test_data():
    """Return the loader of the server's test set."""
    return DataLoader(load_images()[1], 300)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set; return the mean loss."""
    net.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return loss, accuracy and top-3 accuracy of the model on the test set."""
    net.to(device).eval()
    correct, in_top3, loss = 0, 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs, labels = net(images.to(device)), labels.to(device)
            best = outputs.topk(3).indices
            loss += F.cross_entropy(outputs, labels).item()
            correct += (best[:, 0] == labels).sum().item()
            in_top3 += (best == labels[:, None]).any(1).sum().item()
    samples = len(testloader.dataset)
    return loss / len(testloader), correct / samples, in_top3 / samples
