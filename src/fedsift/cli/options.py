"""The options of a run, as many commands take them: on the command line and in a TOML file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fedsift.algorithms import METHODS
from fedsift.algorithms.settings import DeclaredSetting
from fedsift.data import DATASETS
from fedsift.data.folder import use_existing_data_folder
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
FEW = 3
"""The help of an option that at most this many methods have names them."""


def method_options() -> list[Option]:
    """Return an option for each setting that some method declares, the most common first."""
    declared: dict[str, list[tuple[str, DeclaredSetting]]] = {}
    for method in METHODS.values():
        for name, setting in method.settings.items():
            declared.setdefault(name, []).append((method.label, setting))
    by_use = sorted(declared.items(), key=lambda item: -len(item[1]))
    return [(n.replace("_", "-"), uses[0][1].kind, setting_help(uses)) for n, uses in by_use]


def setting_help(uses: Sequence[tuple[str, DeclaredSetting]]) -> str:
    """Combine the help texts of the methods that have a setting.

    >>> from fedsift.algorithms import Setting
    >>> clip = DeclaredSetting("clip", float, 4.0, Setting("Bound on the norm"))
    >>> setting_help([("sift", clip)])
    'sift: Bound on the norm, a finite number.'
    """
    by_text: dict[str, list[str]] = {}
    for label, setting in uses:
        declaration = setting.declaration
        text = ", ".join(part for part in (declaration.help, declaration.range.text) if part)
        by_text.setdefault(f"{text}.", []).append(label)
    if len(by_text) == 1 and len(uses) > FEW:
        return next(iter(by_text))
    return " ".join(f"{', '.join(labels)}: {text}" for text, labels in by_text.items())


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
    METHOD: method_options(),
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
