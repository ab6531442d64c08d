"""The command line: parse, call, print."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from safetensors import SafetensorError

from fedsift.cli.data import app as data_app
from fedsift.cli.front import empty_app
from fedsift.cli.options import (
    METHOD_NAMES,
    RUN,
    Config,
    DataDir,
    Method,
    Out,
    merged,
    path,
    with_run_options,
)
from fedsift.cli.reproduce import reproduce
from fedsift.cli.running import carry_out, carry_out_all, carry_out_report
from fedsift.cli.terminal import show_frame, show_timings, user_input
from fedsift.cli.theory import advise, bounds
from fedsift.codec.inspect import summarize_frame
from fedsift.data.folder import use_existing_data_folder
from fedsift.engine.gpu.stacked import PRECISIONS
from fedsift.engine.processes.torchrun import process_group, rank
from fedsift.errors import ConfigError, Diverged, TooFewClients, WorkerDied
from fedsift.models import MODELS
from fedsift.runs.compare import configs_of, names_of
from fedsift.runs.config import (
    RunConfig,
)
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import environment, federation_of, follow

app = empty_app()

frames = typer.Typer(no_args_is_help=True, help="Look into the frames that travel.")
app.add_typer(frames, name="frame")
app.add_typer(data_app, name="data")

deployments = typer.Typer(no_args_is_help=True, help="Run a federation of real processes.")
app.add_typer(deployments, name="deploy")

TRAINING_FAILED = 3


def main(words: list[str] | None = None) -> int:
    """Run a command. What goes wrong is one line on stderr, and an exit code.

    2 is for bad input, 3 for a training that failed, 1 for the disk.
    """
    try:
        with process_group():
            return int(app(words, standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as problem:
        print(problem.format_message())
        return 0
    except click.ClickException as problem:
        return _fail(problem.format_message(), 2)
    except ConfigError as problem:
        return _fail(str(problem), 2)
    except (Diverged, TooFewClients, WorkerDied) as problem:
        return _fail(str(problem), TRAINING_FAILED)
    except (OSError, SafetensorError) as problem:
        return _fail(str(problem), 1)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    if rank() == 0:  # the other ranks have nothing else to tell
        print(f"fedsift: {line}", file=sys.stderr)
    return code


@app.command()
@with_run_options
def run(
    *,
    algorithm: Method = None,
    config: Config = None,
    out: Out = None,
    data_dir: DataDir = None,
    given: dict[str, Any],
) -> None:
    """Train a federation.

    With no option at all: FedAdam-SSM, 20 clients, 30 rounds, on the digits that come with
    scikit-learn. The folder it leaves holds config.toml, metrics.jsonl, summary.json,
    uploads.jsonl, clients.json, checkpoint.safetensors, model.safetensors and report.html.

    For example:

    * `fedsift run --partition dirichlet --theta 0.1`

    * `fedsift run --algorithm fedadam --rounds 50 --out runs/fedadam`
    """
    with user_input():
        values = merged(config, algorithm=algorithm, out=out, data_dir=data_dir, **given)
        folder_name = values.pop("out", None)
        settings = RunConfig.from_values(values)
        if rank():
            follow([settings])
            return
        federation = federation_of(settings)
        place = folder_name or _new_folder(f"{settings.dataset}-{settings.algorithm}")
        folder = RunFolder.create(place, settings)
    carry_out(folder, settings, federation)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a stopped run.")],
    data_dir: DataDir = None,
) -> None:
    """Continue a stopped run; the result is bit for bit that of an unbroken one.

    Example: `fedsift resume runs/digits-fedadam-ssm-20260101-120000`
    """
    with user_input():
        use_existing_data_folder(data_dir)
        opened = RunFolder.open(folder)
        settings = opened.config()
        if settings.wire == "flower":
            raise ValueError(
                f"{folder} was run on Flower: start its app again to continue it, or the demo with "
                f"'fedsift deploy demo', the same options and --out {shlex.quote(str(folder))}"
            )
        if rank():
            follow([settings])
            return
        federation = federation_of(settings)
    carry_out(opened, settings, federation)


@app.command()
@with_run_options
def compare(
    *,
    algorithms: Annotated[
        str | None,
        typer.Option("--algorithms", help=f"Separated by commas, of: {METHOD_NAMES}."),
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Test accuracy to reach, in (0, 1].")
    ] = None,
    config: Config = None,
    out: Out = None,
    data_dir: DataDir = None,
    given: dict[str, Any],
) -> None:
    """Compare algorithms on one task: the bits each needs to reach a target accuracy.

    Prints the paper's kind of table and writes it as CSV, with a figure and a report. Run it again
    with the same --out to continue after a stop.

    Example: `fedsift compare --algorithms fedadam-ssm,fedadam-top,fedadam --target 0.95`
    """
    with user_input():
        flags = {"algorithms": algorithms, "target": target, "out": out, "data_dir": data_dir}
        values = merged(config, **flags, **given)
        names, goal, folder_name = (values.pop(k, None) for k in ("algorithms", "target", "out"))
        if names is None or goal is None:
            raise ValueError("give --algorithms a,b,c and --target, say 0.95, or both in --config")
        if not isinstance(goal, int | float) or not 0 < goal <= 1:
            raise ValueError(f"target must be in (0, 1], got {goal}")
        values.pop("algorithm", None)
        settings = configs_of(names_of(names), values)
        if rank():
            follow(settings)
            return
        place = folder_name or _new_folder(f"compare-{settings[0].dataset}")
        RunFolder(place).require_free()
        federation_of(settings[0])  # data and model are the same for all
        for each in settings:
            RunFolder(place / each.algorithm).holds(each)  # refuse before anything is made
        folders = [RunFolder.create_or_continue(place / each.algorithm, each) for each in settings]
    carry_out_all(place, list(zip(folders, settings, strict=True)), goal)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or folders that hold such folders.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", parser=path, help="The HTML file to write.")
    ] = Path("report.html"),
) -> None:
    """Draw runs together in one HTML file that needs no network.

    Runs that differ in their seed alone are summarized by mean and spread. A run that is still
    going on, or was stopped, is shown as far as it has come.

    For example:

    * `fedsift report runs/digits-fedadam-ssm-20260101-120000`

    * `fedsift report runs/seed-0 runs/seed-1 runs/seed-2 -o seeds.html`
    """
    with user_input():
        carry_out_report(folders, out)


@frames.command()
def inspect(file: Annotated[Path, typer.Argument(help="A file that holds one frame.")]) -> None:
    """Print a frame's header, its sizes by part, and its distance from the information limit.

    Example: `fedsift frame inspect update.fsf`
    """
    with user_input():
        try:
            frame = file.read_bytes()
        except OSError as problem:
            raise ValueError(f"cannot read {file}: {problem.strerror}") from None
        anatomy = summarize_frame(frame)
    show_frame(anatomy)


app.command()(reproduce)


@app.command()
def bench(
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help=f"Separated by commas, of: {', '.join(MODELS)}.",
            show_default="cnn; on a GPU cnn,vgg11,resnet18",
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="On a GPU: fp32, tf32 or bf16.")
    ] = "fp32",
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds to take the median of.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time a round on this machine, part by part, and compare with the physical limit.

    A round is 20 clients of 30 steps of 64 samples with FedAdam-SSM at 5 %, on random images. The
    limit is the arithmetic and the memory traffic of the local steps at the machine's measured
    peaks.

    Example: `fedsift bench --models cnn --rounds 10`
    """
    with user_input():
        where = RunConfig.from_values({"device": device}).torch_device()
        chosen = models or ("cnn,vgg11,resnet18" if where == "cuda" else "cnn")
        names = [name.strip() for name in chosen.split(",")]
        for name in names:
            if name not in MODELS:
                raise ValueError(f"unknown model {name!r}; choose one of: {', '.join(MODELS)}")
        if precision not in PRECISIONS or (precision != "fp32" and where != "cuda"):
            raise ValueError(f"precision must be fp32, or on a GPU tf32 or bf16, got {precision!r}")
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds}")
    from fedsift.cli.timings import bench as time_rounds  # here, as it loads much

    timings = time_rounds(names, where, precision, rounds)
    if as_json:
        rows = [{**asdict(t), "ratio": t.ratio} for t in timings]
        about = environment(RunConfig(device=where))
        print(json.dumps({"environment": about, "timings": rows}, indent=2))
    else:
        show_timings(timings)


DEMO: dict[str, Any] = {"clients": 3, "rounds": 5, "min_clients": 1}
"""What ``fedsift deploy demo`` begins with in place of a run's defaults."""
DEPLOYED = {
    "dropout": 0.0, "wire": "flower", "device": "cpu", "precision": "fp32", "tensorboard": False
}  # fmt: skip
"""What is settled in a deployment, and so no option of it."""


@deployments.command()
@partial(with_run_options, defaults=replace(RUN, **DEMO), without=DEPLOYED)
def demo(
    *,
    algorithm: Method = None,
    config: Config = None,
    out: Out = None,
    data_dir: DataDir = None,
    given: dict[str, Any],
) -> None:
    """Start a whole Flower federation on this machine, train, and end every process again.

    A SuperLink with TLS, a SuperNode with a registered key for each client, and the rounds that
    `fedsift run` would simulate: the result has the same bits. Needs `fedsift[flower]`. Run it
    again with the same --out to continue after a stop.

    Example: `fedsift deploy demo --clients 4 --rounds 10 --density 0.01`
    """
    with user_input():
        require_flower()
        from fedsift.cli.deploy import deploy_demo

        values = merged(config, algorithm=algorithm, out=out, data_dir=data_dir, **given)
        folder_name = values.pop("out", None)
        for key, settled in DEPLOYED.items():
            if values.get(key, settled) not in (settled, getattr(RUN, key)):
                raise ValueError(f"{key} is for simulations: leave it out of a deployment")
        settings = RunConfig.from_values({**DEMO, **values, **DEPLOYED})
        federation_of(replace(settings, wire="real"))  # refuse before anything is made
        place = folder_name or _new_folder(f"flower-{settings.algorithm}")
        folder = RunFolder.create_or_extend(place, settings)
    deploy_demo(settings, folder)


def require_flower() -> None:
    """Say what to install, before anything is started."""
    if find_spec("flwr") is None:
        raise ValueError("Flower is not installed: pip install 'fedsift[flower]'")


app.command()(bounds)
app.command()(advise)


def _new_folder(name: str) -> Path:
    stem = f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path(stem), 2
    while path.exists():
        path, number = Path(f"{stem}-{number}"), number + 1
    return path
