"""The ServerApp, with FedSift as its strategy."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedsift.flower import FedSift
from quickstart.algorithm import make_algorithm
from quickstart.dataset import load_test
from quickstart.model import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and evaluate the model on the server after each round."""
    config = context.run_config
    torch.manual_seed(0)
    model = make_model()
    x, y = load_test()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        with torch.no_grad():
            output = model(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        accuracy = (output.argmax(1) == y).float().mean()
        return MetricRecord({"accuracy": accuracy.item(), "loss": loss.item()})

    # In a FedAvg app: strategy = FedAvg(min_available_nodes=4). The ClientApp changes as well.
    strategy = FedSift(make_algorithm(config), config["num-clients"], config["folder"])
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["num-server-rounds"],
        timeout=config["round-timeout"],
        evaluate_fn=evaluate,
    )
