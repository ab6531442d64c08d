"""A server of either kind; it notes the accuracy and the time after each round."""

import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from race.task import BATCH, make_algorithm, make_model

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    folder, clients = Path(config["folder"]), config["clients"]
    model = make_model(config["model"])
    start = ArrayRecord(model.state_dict())
    while len(list(grid.get_node_ids())) < clients:
        time.sleep(0.2)
    began, notes = time.monotonic(), []

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        seconds = time.monotonic() - began
        notes.append({"round": server_round, "seconds": seconds, "accuracy": accuracy_of(model)})
        (folder / "notes.json").write_text(json.dumps(notes))
        return MetricRecord({"accuracy": notes[-1]["accuracy"] or 0.0})

    make_strategy(config, clients, folder).start(
        grid, start, config["rounds"], 3600, evaluate_fn=evaluate
    )
    (folder / "done").touch()


def make_strategy(config, clients, folder):
    if config["method"] == "fedavg":
        return FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    from fedsift.flower import FedSift

    return FedSift(make_algorithm(config), clients, folder / "run", batch_size=BATCH)


@torch.no_grad()
def accuracy_of(model):
    if next(model.parameters()).shape[0] != 512:
        return None  # VGG-11 is here for its size
    from fedsift import data

    x, y = data.load("digits").test
    return float((model(x).argmax(1) == y).float().mean())
