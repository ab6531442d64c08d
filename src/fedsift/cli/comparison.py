"""Train the runs of a comparison, and write its table, figure and report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsift.cli.exit_codes import user_input
from fedsift.cli.reports import written_or_explained
from fedsift.cli.settings import command_text, folder_name, merge_config_file, new_folder
from fedsift.cli.tables import clients_table, comparison_table
from fedsift.cli.terminal import err, out, print_path
from fedsift.cli.training import run_with_progress
from fedsift.engine.processes.torchrun import process_group, rank
from fedsift.errors import ConfigError, Diverged
from fedsift.report.collect import read_run
from fedsift.report.files import comparison_figure
from fedsift.report.html import write_report
from fedsift.runs.compare import configs_of, csv_of, names_of, table_of
from fedsift.runs.config import RunConfig
from fedsift.runs.disk import replace_file
from fedsift.runs.folder import RunFolder
from fedsift.runs.language import is_language_model
from fedsift.runs.records import last_round
from fedsift.runs.run import federation_of, train_for_rank_zero, with_clients

Run = tuple[RunFolder, RunConfig]


def start_comparison(config_file: Path | None, given: Mapping[str, Any]) -> None:
    """Train every algorithm of a comparison, or continue where it stopped, and compare them."""
    with process_group():
        with user_input():
            values = merge_config_file(config_file, given)
            names, target, path = (values.pop(k, None) for k in ("algorithms", "target", "out"))
            for key in ("algorithm", "data_dir"):
                values.pop(key, None)
            check_given(names, target)
            configs = configs_of(names_of(names), values)
            check_target(target, is_language_model(configs[0].model))
            if rank():
                train_for_rank_zero(configs)
                return
            path = path or new_folder(f"compare-{configs[0].dataset}")
            runs, parameters = open_folders(path, configs)
        command = command_text("compare", {"config": config_file, **given, "out": path})
        train_all(runs, command)
        compare_runs(path, runs, target, parameters)


def check_given(names: Any, target: Any) -> None:
    """Refuse a comparison without algorithms or a target."""
    if names is None or target is None:
        raise ConfigError(
            "compare needs --algorithms, such as fedadam-ssm,fedadam, and --target, such as 0.95, "
            "as options or in the --config file"
        )
    if not isinstance(target, int | float):
        raise ConfigError(f"target must be a number, got {target}")


def check_target(target: float, is_perplexity: bool) -> None:
    """Refuse a target that no accuracy, or for a language model no perplexity, can reach.

    >>> check_target(95, is_perplexity=False)
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: target must be in (0, 1], got 95
    """
    if is_perplexity and not 1 < target < math.inf:
        raise ConfigError(f"the target of a language model is a perplexity above 1, got {target}")
    if not is_perplexity and not 0 < target <= 1:
        raise ConfigError(f"target must be in (0, 1], got {target}")


def open_folders(path: Path, configs: Sequence[RunConfig]) -> tuple[list[Run], int]:
    """Create or open a folder for each run; return them and the number of model parameters.

    Everything is checked before the first folder is created.
    """
    RunFolder(path).require_free()
    federation = federation_of(configs[0])  # data and model are the same for all
    configs = [with_clients(config, federation) for config in configs]
    for config in configs:
        RunFolder(path / folder_name(config.algorithm)).has_run(config)
    folders = [
        RunFolder.create_or_continue(path / folder_name(config.algorithm), config)
        for config in configs
    ]
    return list(zip(folders, configs, strict=True)), federation.task.layout.d


def train_all(runs: Sequence[Run], command: str) -> None:
    """Train the remaining rounds of every run; a diverged run counts as a result.

    The command continues the comparison after an interruption.
    """
    for folder, config in runs:
        try:
            # One federation at a time: its data is freed when the next is built.
            run_with_progress(folder, config, federation_of(config), command)
        except Diverged as problem:
            err.print(f"{config.algorithm}: {problem}", style="yellow", markup=False)


def compare_runs(path: Path, runs: Sequence[Run], target: float, parameters: int) -> None:
    """Print the table of a comparison, and write its CSV file, figure and report."""
    histories = {config.algorithm: folder.history() for folder, config in runs}
    shown = [read_run(f.path) for f, config in runs if last_round(histories[config.algorithm])]
    if not shown:
        raise Diverged("every algorithm diverged; try a smaller --lr")
    rows = table_of(histories, target)
    config = runs[0][1]
    is_language = is_language_model(config.model)
    goal = f"perplexity {target:g}" if is_language else f"{100 * target:.1f} %"
    title = f"{config.dataset}, {config.partition}: MB per client to {goal}"
    replace_file(path / "compare.csv", csv_of(rows).encode())
    out.print(comparison_table(rows, title, config, parameters))
    if (clients := clients_table(rows)) is not None:
        out.print(clients)
    print_path("table", path / "compare.csv")
    with written_or_explained("figure", path / "compare.png", path) as figure:
        comparison_figure(shown, figure, title, target)
    with written_or_explained("report", path / "report.html", path) as report:
        write_report(shown, report, title, None if is_language else target)
