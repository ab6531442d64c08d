"""The command ``fedsift advise``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fedsift.cli.exit_codes import user_input
from fedsift.cli.options import Data, DataDir, Json, option
from fedsift.cli.terminal import err, out, plain_table

if TYPE_CHECKING:
    from fedsift.advise.calibration import LineCallback
    from fedsift.advise.recommendation import Advice


def advise(
    dataset: Annotated[str | None, option("--dataset", "Data set.", "digits")] = None,
    data: Data = None,
    model: Annotated[
        str | None, option("--model", "Model; auto picks one that fits the data.", "auto")
    ] = None,
    loss: Annotated[
        str | None, option("--loss", "Loss: package.module:function.", "cross-entropy")
    ] = None,
    budget_mbit: Annotated[
        float, option("--budget-mbit", "Uplink budget per client in Mibit, the paper's unit.")
    ] = 50.0,
    target: Annotated[
        float | None, option("--target", "Accuracy to reach.", "what the defaults reach")
    ] = None,
    clients: Annotated[int | None, option("--clients", "Number of clients.", "20")] = None,
    partition: Annotated[
        str | None, option("--partition", "iid, dirichlet or documents.", "iid")
    ] = None,
    theta: Annotated[float | None, option("--theta", "Dirichlet concentration.", "0.1")] = None,
    batch_size: Annotated[int, option("--batch-size", "Samples per local step; 0: all.")] = 64,
    seed: Annotated[int, option("--seed", "Seed of weights, partition and mini-batches.")] = 0,
    calibration_rounds: Annotated[
        int, option("--calibration-rounds", "Rounds with the default settings, for reference.")
    ] = 5,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Recommend L, the learning rate and the density of FedAdam-SSM for a task, or `sift` for it.

    Runs a short calibration on the training data, a few minutes; it does not use the test set.

    Examples:
    * `fedsift advise --partition dirichlet --budget-mbit 10 --target 0.9`

    * `fedsift advise --data my_data:load --model my_model:make`

    """
    from fedsift.advise.calibration import calibrate, calibration_task
    from fedsift.cli.settings import merge_config_file
    from fedsift.runs.config import RunConfig

    given = {
        "dataset": dataset, "data": data, "model": model, "loss": loss, "clients": clients,
        "partition": partition, "theta": theta, "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    with user_input():
        values = merge_config_file(None, {**given, "data_dir": data_dir})
        values.pop("data_dir", None)
        task = calibration_task(RunConfig.from_values(values))
        with progress_line() as show_line:
            advice = calibrate(
                task, budget_mibit=budget_mbit, target=target, rounds=calibration_rounds,
                on_settings=lambda line: err.print(line, highlight=False, soft_wrap=True),
                on_round=show_line,
            )  # fmt: skip
    command = command_line({**given, "data_dir": data_dir}, advice)
    if as_json:
        print(json.dumps({**advice.json(), "command": command}, indent=2, allow_nan=False))
    else:
        print_advice(advice, command)


@contextmanager
def progress_line() -> Iterator[LineCallback]:
    """Show the settings being tried and the elapsed time until the block ends."""
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("the first round", total=None)
        yield lambda line: progress.update(task, description=line)


def command_line(values: dict[str, Any], advice: Advice) -> str:
    """Return the command for a run with the recommended settings."""
    from fedsift.cli.settings import command_text

    chosen = {**vars(advice.choice), "rounds": max(advice.rounds, 1)}
    return command_text("run", {**values, **chosen})


def print_advice(advice: Advice, command: str) -> None:
    """Print the recommendation and its reasons."""
    table = plain_table("recommendation", show_header=False)
    choice = advice.choice
    table.add_row("algorithm", choice.algorithm)
    table.add_row("local steps", str(choice.local_steps))
    table.add_row("learning rate", f"{choice.lr:g}")
    table.add_row("density", f"{choice.density:g}")
    table.add_row("rounds", f"{advice.rounds:,}")
    source = "measured" if advice.measured else "predicted"
    goal = f"{100 * advice.target:.1f} %"
    how = "" if advice.predicted is None else f" ({source})"
    table.add_row(f"Mibit to {goal}", f"{mibit_text(advice.predicted)}{how}")
    table.add_row(f"Mibit to {goal}, paper's defaults", mibit_text(advice.predicted_default))
    out.print(table)
    for heading, lines in (("why", advice.reasons), ("next", (command, *advice.next))):
        for line in lines:
            out.print(f"{heading}: {line}", soft_wrap=True, highlight=False)


def mibit_text(x: float | None) -> str:
    """Return Mibit to three digits.

    >>> mibit_text(1.234), mibit_text(0.00172), mibit_text(None)
    ('1.23', '0.00172', 'no forecast')
    """
    return "no forecast" if x is None else f"{x:.3g}"
