"""The work in Flower's simulation: FedAvg, one actor a core, one thread each."""

import os
import sys

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import CLIENTS, Clock, clients, network, train

ROUNDS, OUT = int(sys.argv[1]), sys.argv[2]
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train_client(message, context):
    torch.set_num_threads(1)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = clients()[context.node_config["partition-id"]]
    train(model, x, y)
    metrics = MetricRecord({"num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round ends."""

    def __init__(self, clock):
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        self.clock = clock

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.clock.tick()
        return result


@server_app.main()
def serve(grid, context):
    clock = Clock()
    weights = ArrayRecord(network().state_dict())
    Timed(clock).start(grid, initial_arrays=weights, num_rounds=ROUNDS)
    clock.write(OUT)


if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    run_simulation(
        server_app,
        client_app,
        num_supernodes=CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores},
        },
    )
