"""The command ``fedsift rollback``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rollback(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    round: Annotated[int, typer.Argument(help="The last round to keep.")],
) -> None:
    """Return a run to the end of an earlier round.

    The metrics of later rounds, the model, the summary and the report are removed. The run can then
    be continued from there. The checkpoints of the last rounds are kept, as many as
    `--keep-checkpoints`.

    Example: `fedsift rollback runs/digits-fedadam-ssm-20260101-120000 20`
    """
    from fedsift.cli.exit_codes import user_input
    from fedsift.cli.training import how_to_continue
    from fedsift.runs import RunFolder
    from fedsift.runs import rollback as roll_back

    with user_input():
        roll_back(folder, round)
    print(f"{folder} is at round {round}; {how_to_continue(RunFolder.open(folder))}")
