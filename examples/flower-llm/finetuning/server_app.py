"""The ServerApp, with FedSift as its strategy."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedsift
from fedsift.flower import FedSift, arrays_of
from fedsift.llm import save_adapter
from finetuning.algorithm import make_algorithm
from finetuning.model import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the adapters, and write them for peft. Clients evaluate on their own text."""
    config = context.run_config
    model = make_model(config)
    strategy = FedSift(
        make_algorithm(config),
        config["num-clients"],
        config["folder"],
        batch_size=config["batch-size"],
    )
    strategy.start(
        grid=grid,
        initial_arrays=arrays_of(model),
        num_rounds=config["num-server-rounds"],
        timeout=config["round-timeout"],
    )
    save_adapter(fedsift.Result.load(config["folder"]), model, Path(config["folder"], "adapter"))
