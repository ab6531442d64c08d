"""Run a whole Flower federation of real processes on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsift.cli.exit_codes import user_input
from fedsift.cli.options import DEFAULTS
from fedsift.cli.progress import run_progress
from fedsift.cli.settings import command_text, merge_config_file, new_folder
from fedsift.cli.tables import summary_table
from fedsift.cli.terminal import err, out, print_path
from fedsift.cli.training import explained_interruption
from fedsift.data.folder import data_folder
from fedsift.errors import ConfigError, require_packages
from fedsift.runs.config import RunConfig
from fedsift.runs.folder import RunFolder
from fedsift.runs.language import is_language_model
from fedsift.runs.run import federation_of
from fedsift.runs.sigterm import exit_on_sigterm
from fedsift.task.user_code import is_user_code

if TYPE_CHECKING:
    from fedsift.flower.local import LocalFederation

COMPLETED = "finished:completed"
HOURS = 3600.0
MODULES_OF_DATASETS = {"digits": ["sklearn.datasets"]}
"""What loading a data set imports; importing it in advance saves time per message."""


def start_demo(
    config_file: Path | None,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
) -> None:
    """Check the options, then start the federation."""
    with user_input():
        require_packages("deployments", "flwr", extra="flower")
        values = merge_config_file(config_file, given)
        path, _, port = (values.pop(key, None) for key in ("out", "data_dir", "metrics_port"))
        for key, value in fixed.items():
            if values.get(key, value) not in (value, DEFAULTS[key]):
                raise ConfigError(f"{key} applies to simulations only: leave it out")
        if is_user_code(str(values.get("dataset", ""))):
            raise ConfigError("the demo trains on built-in data sets: choose one with --dataset")
        config = RunConfig.from_values({**defaults, **values, **fixed})
        if is_language_model(config.model):
            raise ConfigError(
                "the demo has no language models: the app in examples/flower-llm trains them"
            )
        simulated = federation_of(replace(config, wire="real"))  # refuses invalid settings
        path = path or new_folder(f"flower-{config.algorithm}")
        folder = RunFolder.create_or_extend(path, config)
    command = command_text("deploy demo", {"config": config_file, **given, "out": path})
    deploy_demo(config, folder, simulated.task.layout.d, command, port)


def deploy_demo(
    config: RunConfig, folder: RunFolder, parameters: int, command: str, metrics_port: int | None
) -> None:
    """Start the federation, train with progress output, and end every process.

    The command continues the run after an interruption.
    """
    from fedsift.flower.local import LocalFederation, ProcessFailed

    # The processes run in another directory, and import the user's own modules from this one.
    modules = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"FEDSIFT_DATA": str(data_folder().absolute()), "PYTHONPATH": modules}
    preload = ["fedsift.flower.demo", *MODULES_OF_DATASETS.get(config.dataset, ())]
    federation = LocalFederation(folder.path / "federation", env, preload=preload)
    with explained_interruption(folder, command), exit_on_sigterm(), federation:
        start_processes(federation, config, folder, metrics_port)
        wait_with_progress(federation, folder, config, parameters)
        statuses = federation.statuses()  # Flower's own exit code is 0 even for failed runs
    if statuses != [COMPLETED]:
        raise ProcessFailed(failure_reason(federation))
    out.print(summary_table(folder.summary()))
    print_path("report", folder.path / "report.html")


def start_processes(
    federation: LocalFederation, config: RunConfig, folder: RunFolder, metrics_port: int | None
) -> None:
    """Start a SuperNode for each client, then the run itself."""
    from fedsift.flower.demo import write_app

    err.print(f"SuperLink at 127.0.0.1:{federation.port}, with TLS and node keys")
    names = [f"node-{n}" for n in range(config.clients)]
    for n, (name, key) in enumerate(federation.register(names).items()):
        federation.start_node(name, key, n, config.clients)
    err.print(f"{config.clients} SuperNodes, each with a registered key")
    app = federation.folder / "app"
    shutil.rmtree(app, ignore_errors=True)
    write_app(app, config, folder.path, metrics_port)
    federation.run(app)


def wait_with_progress(
    federation: LocalFederation, folder: RunFolder, config: RunConfig, parameters: int
) -> None:
    """Show each round until the run ends."""
    shown = len(folder.history())
    with run_progress(config, parameters, shown) as show:

        def has_ended() -> bool:
            nonlocal shown
            history = folder.history()
            for record in history[shown:]:
                show(record)
            shown = len(history)
            return federation.processes["run"].poll() is not None

        federation.wait_until(has_ended, "superlink", seconds=24 * HOURS)


def failure_reason(federation: LocalFederation) -> str:
    """Return why a run failed, from its log."""
    log = federation.log("run")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if ("Error" in line or "TooFew" in line) and ": " in line]
    return f"the run failed ({errors[-1] if errors else 'no reason given'}): see {log}"
