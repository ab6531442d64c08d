"""The commands ``fedsift deploy``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsift.cli.options import DEFAULTS, Config, DataDir, Json, Method, Out, with_run_options
from fedsift.cli.user_settings import RunCommand
from fedsift.errors import require_packages

DEMO: dict[str, Any] = {"clients": 3, "rounds": 5, "min_clients": 1}
"""Defaults that differ from those of ``fedsift run``."""
DEPLOYED: dict[str, Any] = {
    "dropout": 0.0, "wire": "flower", "device": "cpu", "precision": "fp32", "tensorboard": False,
    "client_tests": False, "validation": 0.0,
    # The noise would follow from the seed, which every client knows.
    "dp_clip": 0.0, "dp_clip_m": 0.0, "dp_clip_v": 0.0, "dp_noise": 0.0, "dp_epsilon": 0.0,
    "dp_delta": 1e-5,
}  # fmt: skip
"""Settings that are fixed in a deployment, and therefore not options."""

app = typer.Typer(no_args_is_help=True, help="Deploy a federation on Flower.")


@app.command(cls=RunCommand)
@partial(with_run_options, defaults={**DEFAULTS, **DEMO}, without=DEPLOYED)
def demo(
    *,
    algorithm: Method = None,
    config: Config = None,
    out: Out = None,
    data_dir: DataDir = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=1,
            max=65535,
            help="Serve metrics for Prometheus on this port of 127.0.0.1.",
            show_default="none",
        ),
    ] = None,
    given: dict[str, Any],
) -> None:
    """Run a complete Flower federation on this machine: start it, train, and shut it down.

    Starts a SuperLink with TLS and, for each client, a SuperNode with a registered key. The result
    is bit-identical to that of `fedsift run` with the same options. Requires Flower. To continue
    after an interruption, run the same command with the same --out.

    Example: `fedsift deploy demo --clients 4 --rounds 10 --density 0.01`
    """
    from fedsift.cli.demo import start_demo

    options = {"algorithm": algorithm, "out": out, "data_dir": data_dir, **given}
    options["metrics_port"] = metrics_port
    start_demo(config, options, defaults=DEMO, fixed=DEPLOYED)


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="Run folder of the server.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it every two seconds until the run ends.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a run on Flower is doing: its round, whom it waits for, and when it should end.

    Reads the folder on the server's machine. The exit code is 0 while the run is in progress, and 3
    if it has ended, finished or not.

    Example: `fedsift deploy status runs/first --watch`
    """
    from fedsift.cli.status import show_status

    raise typer.Exit(show_status(folder, watch, json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superexec(
    context: typer.Context,
    *,
    preload: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Import this module once, too. May be repeated."),
    ] = None,
) -> None:
    """Run Flower's SuperExec, with tasks that need not import PyTorch again.

    Takes the options of `flower-superexec`, for a SuperNode or SuperLink that was started with
    `--isolation process`. Each message still has its own process, but it is forked from one that
    has imported PyTorch, fedsift and the preloaded modules. Requires Flower; not for Windows.

    Example: `fedsift deploy superexec --runtime-api-address 127.0.0.1:9094 --insecure`
    """
    require_packages("deployments", "flwr", extra="flower")
    from fedsift.flower.warm import run_superexec

    run_superexec(context.args, preload or ())
