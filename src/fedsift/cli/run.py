"""The commands ``fedsift run`` and ``fedsift resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedsift.cli.options import Config, Data, DataDir, Method, Out, with_run_options


@with_run_options
def run(
    *,
    algorithm: Method = None,
    data: Data = None,
    config: Config = None,
    out: Out = None,
    data_dir: DataDir = None,
    given: dict[str, Any],
) -> None:
    """Train a model with a simulated federation.

    Without options: FedAdam-SSM, 20 clients, 30 rounds, on scikit-learn's digits; it takes less
    than a minute on two cores. The run folder holds the metrics of every round, the trained model
    and report.html. After an interruption, `fedsift resume` continues the run.

    Examples:
    * `fedsift run --partition dirichlet --theta 0.1`

    * `fedsift run --algorithm sift --rounds 50 --out runs/sift`

    * `fedsift run --dataset fashion-mnist --density 0.01 --lr 0.002`

    * `fedsift run --data my_data:load --model my_model:make --lr 0.002`

    * `fedsift run --config runs/sift/config.toml --seed 1`

    """
    from fedsift.cli.training import start_run

    options = {"algorithm": algorithm, "data": data, "out": out, "data_dir": data_dir, **given}
    start_run(config, options)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of an interrupted run.")],
    data_dir: DataDir = None,
) -> None:
    """Continue an interrupted run, with the same result as an uninterrupted one.

    The results agree bit for bit on the same machine and software.

    Example: `fedsift resume runs/digits-fedadam-ssm-20260101-120000`
    """
    from fedsift.cli.training import resume_run

    resume_run(folder, data_dir)
