"""The options of a run, as many commands take them: on the command line and in a TOML file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fedsift.algorithms import METHODS
from fedsift.data import DATASETS
from fedsift.data.files import use_existing_data_folder
from fedsift.errors import ConfigError
from fedsift.models import MODELS
from fedsift.runs.config import (
    RunConfig,
    check_type,
    read_values,
)

METHOD_NAMES = ", ".join(sorted(METHODS))
MODEL_HELP = (
    f"Model: {', '.join(MODELS)}; auto picks one that fits the data; your own as "
    "package.module:factory."
)
Option = tuple[str, type, str]
COMMON = "The federation"
METHOD = "The algorithm's own settings (where it has them)"
OPTIONS: dict[str, list[Option]] = {
    COMMON: [
        ("dataset", str, f"Data set: {', '.join(DATASETS)}."),
        ("model", str, MODEL_HELP),
        ("clients", int, "Number of clients."),
        ("rounds", int, "Communication rounds."),
        ("batch-size", int, "Samples a local step; 0 takes the whole local set."),
        ("partition", str, "How data is dealt to clients: iid, dirichlet or documents."),
        ("theta", float, "Dirichlet concentration: smaller is less alike."),
        ("participation", float, "Share of the clients that train in a round."),
        ("dropout", float, "Chance that a client trains and its update is lost."),
        ("min-clients", int, "A round with fewer updates than this stops the run."),
        (
            "max-norm-ratio",
            float,
            "Reject updates whose norm is more than this many times the usual one; 0: no bound.",
        ),
        ("wire", str, "count: measure every message; real: also encode and decode it."),
        ("seed", int, "Fixes the weights, the partition, cohorts and mini-batches."),
        ("device", str, "auto, cpu or cuda."),
        ("precision", str, "On a GPU: fp32, tf32 or bf16."),
        ("tensorboard", bool, "Also write TensorBoard events into the run's folder."),
    ],
    METHOD: [
        ("local-steps", int, "L, local mini-batch steps a round."),
        ("lr", float, "Learning rate."),
        ("density", float, "α = k/d, the share of coordinates that is sent, in (0, 1]."),
        ("beta1", float, "Decay of the first moment."),
        ("beta2", float, "Decay of the second moment."),
        ("eps", float, "ε inside Adam's square root."),
        ("bits", int, "Efficient-Adam and sift: bits a coordinate of W, 2 to 8."),
        ("down-density", float, "sift: the share of coordinates that the server sends, in (0, 1]."),
        ("decay", float, "sift, SparseLoCo: how much of what was not sent is kept, in [0, 1]."),
        ("momentum", float, "sift: the server's momentum, in [0, 1)."),
        ("clip", float, "sift: the most that a gradient's norm may be; 0: no clipping."),
        (
            "average",
            float,
            "sift: the model is W averaged over about this share of all rounds; 0: W.",
        ),
        ("outer-lr", float, "SparseLoCo: the server's learning rate."),
        ("correction", float, "FedAdamW: α, how much of the last global update is taken again."),
        ("weight-decay", float, "FedAdamW: λ, the decoupled decay of the weights."),
        (
            "warmup-rounds",
            int,
            "1-bit Adam: rounds of FedAdam at first; sift: rounds in which clip rises.",
        ),
    ],
}


RUN = RunConfig()


def with_run_options(
    command: Callable[..., None], defaults: RunConfig = RUN, without: Container[str] = ()
) -> Callable[..., None]:
    """Give a command every option of a run; it gets those that were set as one dict ``given``."""
    own = list(signature(command, eval_str=True).parameters.values())
    options = [(option, panel) for panel, row in OPTIONS.items() for option in row]
    shared = [_parameter(*each, defaults) for each in options]
    shared = [p for p in shared if p.name not in without]
    names = [p.name for p in shared]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        set_by_user = {n: v for n in names if (v := values.pop(n)) is not None}
        command(**values, given=set_by_user)

    kept = [p for p in own if p.name != "given"]
    wrapped.__signature__ = Signature([*kept, *shared])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in (*kept, *shared)}
    del wrapped.__wrapped__  # typer would follow it to the undecorated signature
    return wrapped


def _parameter(option: Option, panel: str, defaults: RunConfig) -> Parameter:
    flag, kind, text = option
    name = flag.replace("-", "_")
    default = getattr(defaults, name, None)
    shown = "the algorithm's own" if default is None else str(default)
    about = typer.Option(
        f"--{flag}",
        help=text,
        show_default=False if kind is bool else shown,
        rich_help_panel=panel,
    )
    annotation = Annotated[kind | None, about]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def path(text: str) -> Path:
    """A path that names something: an empty one, as of a variable that is not set, does not."""
    if not text:
        raise click.BadParameter("it is empty: leave the option out, or name a path")
    return Path(text)


Method = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        help=f"One of: {METHOD_NAMES}.",
        show_default="fedadam-ssm",
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of the same keys; flags win over it.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", parser=path, help="Folder for the results.", show_default="under runs/"),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        parser=path,
        help="Folder of the data sets.",
        show_default="FEDSIFT_DATA, or ~/.cache/fedsift/data",
    ),
]


def merged(config: Path | None, **flags: Any) -> dict[str, Any]:
    """A config file's keys and the flags that were given; flags win. The data folder is used."""
    values = read_values(config) if config else {}
    for key in values.keys() & {"out", "data_dir"}:
        check_type(key, values[key], "str")
        if not values[key]:
            raise ConfigError(f"{key.replace('_', '-')} is empty: leave it out, or name a path")
        values[key] = path(values[key])
    values |= {key: value for key, value in flags.items() if value is not None}
    if flags.get("theta") is not None and values.get("partition") != "dirichlet":
        raise ConfigError("theta is for --partition dirichlet: give that, too, or leave it out")
    use_existing_data_folder(values.pop("data_dir", None))
    return values
