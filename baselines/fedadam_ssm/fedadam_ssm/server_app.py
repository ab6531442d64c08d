"""The ServerApp: it trains, and evaluates the global model on the test set after each round."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedadam_ssm.dataset import load_dataset
from fedadam_ssm.model import make_model
from fedadam_ssm.strategy import make_strategy
from fedsift.flower import arrays_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    config = context.run_config
    model = make_model(config)
    x, y = load_dataset(config).test

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        with torch.no_grad():
            output = torch.cat([model(part) for part in x.split(1000)])
        accuracy = (output.argmax(1) == y).float().mean()
        loss = nn.functional.cross_entropy(output, y)
        return MetricRecord({"accuracy": accuracy.item(), "loss": loss.item()})

    make_strategy(config).start(
        grid=grid,
        initial_arrays=arrays_of(model),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
