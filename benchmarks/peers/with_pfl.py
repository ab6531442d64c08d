"""The work in pfl-research: FederatedAveraging, one process a core, one thread each."""

import itertools
import os
import sys

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import BATCH, CLIENTS, LR, STEPS, Clock, clients, network


class Network(nn.Module):
    """The network with the two methods that pfl asks for."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x)

    def loss(self, x, y, is_eval=False):
        self.train(not is_eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        return {}


class Ticking(TrainingProcessCallback):
    """Notes when each round ends."""

    def __init__(self, clock):
        self.clock = clock

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.clock.tick()
        return False, Metrics()


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - the generator that pfl draws from
    data = clients()

    def dataset_of(user):
        x, y = data[user]
        rows = torch.randperm(len(x))
        return Dataset((x[rows], y[rows]), user_id=str(user))

    turns = itertools.cycle(range(CLIENTS))
    federated = FederatedDataset(dataset_of, lambda: next(turns))
    net = Network()
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.Adam,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    rounds, clock = int(sys.argv[1]), Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
        ),
        SimulatedBackend(federated, federated),
        model,
        NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=STEPS,
            local_learning_rate=LR,
            local_batch_size=BATCH,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticking(clock)],
        send_metrics_to_platform=False,
    )
    if os.environ.get("RANK", "0") == "0":
        clock.write(sys.argv[2])
