"""The command ``fedsift bench``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedsift.cli.catalog import catalog
from fedsift.cli.exit_codes import user_input
from fedsift.cli.options import Json
from fedsift.cli.terminal import out, plain_table
from fedsift.errors import ConfigError, require_choice

if TYPE_CHECKING:
    from fedsift.cli.timings import Timing

LORA = "smollm2-135m-lora"
MODELS = [*catalog()["models"], LORA]
GPU_MODELS = "cnn,vgg11,resnet18"


def bench(
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help=f"Comma-separated list of: {', '.join(MODELS)}.",
            show_default=f"cnn; on a GPU {GPU_MODELS}",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="On a GPU: fp32, tf32 or bf16.")
    ] = "fp32",
    rounds: Annotated[
        int, typer.Option("--rounds", help="Number of rounds to time; the median is shown.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """Time a round on this machine, part by part, and compare with the physical limit.

    A round is 20 clients × 30 steps × 64 samples with FedAdam-SSM at density 5 %, on random data;
    for LoRA on a language model with the sizes of SmolLM2-135M, 10 steps × 8 samples of 128 tokens.
    The limit is the time for the arithmetic and the memory traffic of the local steps at the
    measured peak speeds of this machine.

    Example: `fedsift bench --models cnn --rounds 10`
    """
    from fedsift.cli.timings import bench as time_rounds
    from fedsift.runs.config import RunConfig
    from fedsift.runs.run import environment

    with user_input():
        device = RunConfig.from_values({"device": device}).torch_device()
        names = models_to_time(models, device)
        check_bench(device, precision, rounds)
    timings = time_rounds(names, device, precision, rounds)
    if as_json:
        rows = [{**asdict(t), "ratio": t.ratio} for t in timings]
        about = environment(RunConfig(device=device))
        print(json.dumps({"environment": about, "timings": rows}, indent=2))
    else:
        show_timings(timings)


def models_to_time(models: str | None, device: str) -> list[str]:
    """Return the names of the models, or the default ones of the device."""
    chosen = models or (GPU_MODELS if device == "cuda" else "cnn")
    names = [name.strip() for name in chosen.split(",")]
    for name in names:
        require_choice("model", name, MODELS)
    return names


def check_bench(device: str, precision: str, rounds: int) -> None:
    """Check that the device supports the precision and that there is a round to time."""
    if precision not in catalog()["precisions"] or (precision != "fp32" and device != "cuda"):
        raise ConfigError(f"precision must be fp32, or on a GPU tf32 or bf16, got {precision!r}")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")


def show_timings(timings: Iterable[Timing]) -> None:
    """Print a table per model as soon as it has been timed."""
    for timing in timings:
        out.print(timing_table(timing))


def timing_table(t: Timing) -> Table:
    """Return the parts of a round and the limit."""
    table = plain_table(f"{t.model}, {t.parameters:,} parameters, {t.device} in {t.precision}")
    table.add_column(t.work)
    table.add_column("seconds", justify="right")
    table.add_column("of the round", justify="right")
    parts = {"training": t.train, "selection and accounting": t.select, "merging": t.merge}
    for name, seconds in {**parts, "round": t.round}.items():
        table.add_row(name, f"{seconds:.4g}", f"{100 * seconds / t.round:.1f} %")
    table.add_row("evaluation", f"{t.evaluate:.4g}", "")
    limit = f"limit: {t.flops / 1e9:,.0f} GFLOP, {t.bytes / 1e9:,.1f} GB"
    table.add_row(limit, f"{t.limit:.4g}", f"{100 / t.ratio:.1f} %")
    return table
