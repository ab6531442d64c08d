"""The command ``fedsift deploy demo``."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer

from fedsift.cli.options import DEFAULTS, Config, DataDir, Method, Out, with_run_options
from fedsift.cli.user_settings import RunCommand

DEMO: dict[str, Any] = {"clients": 3, "rounds": 5, "min_clients": 1}
"""Defaults that differ from those of ``fedsift run``."""
DEPLOYED: dict[str, Any] = {
    "dropout": 0.0, "wire": "flower", "device": "cpu", "precision": "fp32", "tensorboard": False
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
    start_demo(config, options, defaults=DEMO, fixed=DEPLOYED)
