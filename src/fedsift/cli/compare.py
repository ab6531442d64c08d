"""The command ``fedsift compare``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedsift.cli.options import (
    METHOD_NAMES,
    OTHER_METHODS,
    Config,
    Data,
    DataDir,
    Out,
    with_run_options,
)


@with_run_options
def compare(
    *,
    algorithms: Annotated[
        str | None,
        typer.Option(
            "--algorithms", help=f"Comma-separated list of: {METHOD_NAMES}. {OTHER_METHODS}"
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            help="Test accuracy to reach, in (0, 1]; the perplexity of a language model.",
        ),
    ] = None,
    data: Data = None,
    config: Config = None,
    out: Out = None,
    data_dir: DataDir = None,
    given: dict[str, Any],
) -> None:
    """Compare algorithms on one task: the bytes each needs to reach a target accuracy.

    Prints a table, and writes it to compare.csv together with a figure and a report. Every
    algorithm gets the settings that it has. To continue after an interruption, run the same command
    with the same --out.

    Example: `fedsift compare --algorithms fedadam-ssm,fedadam-top,fedadam --target 0.95`
    """
    from fedsift.cli.comparison import start_comparison

    options = {"algorithms": algorithms, "target": target, "data": data, "out": out}
    start_comparison(config, {**options, "data_dir": data_dir, **given})
