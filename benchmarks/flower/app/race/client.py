"""A client of either kind: one that sends all its weights to FedAvg, or fedsift's."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from race.task import BATCH, load_share, make_algorithm, make_model

app = ClientApp()


@app.train()
def train(message, context):
    config = context.run_config
    if config["method"] == "fedavg":
        return fedavg(message, context, config)
    from fedsift.flower import client_app

    fedsift_app = client_app(
        lambda: make_model(config["model"]),
        lambda partition, partitions: load_share(config["model"], partition, partitions),
        make_algorithm,
    )
    return fedsift_app(message, context)


def fedavg(message, context, config):
    """What a Flower tutorial does: load the weights, take SGD steps, send the weights."""
    torch.set_num_threads(1)
    place = context.node_config
    model = make_model(config["model"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load_share(config["model"], place["partition-id"], place["num-partitions"])
    torch.manual_seed(place["partition-id"])
    for _ in range(config["local-steps"]):
        rows = torch.randperm(len(x))[:BATCH]
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= config["lr"] * gradient
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": min(BATCH, len(x))})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
