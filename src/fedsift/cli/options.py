"""Options that several commands share, on the command line and as keys of a TOML file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fedsift.cli.catalog import catalog

Value = float | int | bool | str | None
"""The value of a setting of a method."""
TYPES = {"int": int, "float": float, "str": str, "bool": bool}
DEFAULTS: Mapping[str, Any] = {key: about["default"] for key, about in catalog()["run"].items()}
"""The defaults of ``fedsift run``."""
METHOD_NAMES = ", ".join(method["name"] for method in catalog()["methods"])
NAMING = "fedadam runs Adam on the clients; what Flower calls FedAdam is fedopt."
OTHER_METHODS = (
    "compressed-NAME compresses what that method sends; package.module:method is your own."
)
"""The help text of names that are not in the list of methods."""
METHOD_PANEL = "Settings of the algorithm (each applies to the algorithms that have it)"
FEW = 3
"""Up to this many methods are named in the help of a setting that means the same to them."""
PANELS: dict[str, dict[str, str]] = {
    "Data and model": {
        "dataset": f"Data set: {', '.join(catalog()['datasets'])}; text by author for language "
        f"models: {', '.join(catalog()['texts'])}, folder:PATH (one .txt file per client).",
        "model": f"Model: {', '.join(catalog()['models'])}; auto picks one that fits the data; "
        "package.module:factory is your own; llm:PATH is a language model, llm:tiny a random one.",
        "loss": "Loss: package.module:function of the model's output and y; auto is cross-entropy.",
        "partition": "How the data is split across clients: iid, dirichlet or documents (of text "
        "by author: one author per client, those with the longest texts).",
        "theta": "Dirichlet concentration; smaller values make clients less alike.",
        "validation": "Share of the training data that is held out from the clients and takes the "
        "place of the test set, for choosing settings; 0: the test set.",
    },
    "Federation": {
        "clients": "Number of clients.",
        "rounds": "Number of communication rounds.",
        "batch_size": "Samples per local step; 0 uses the whole local data set.",
        "weights": "Clients' weights in the mean: batch (mini-batch size), examples (number of "
        "samples) or equal; auto is the algorithm's own.",
        "participation": "Share of the clients that train in each round, in (0, 1].",
        "dropout": "Probability that a client trains but its update is lost, in [0, 1).",
        "min_clients": "Stop the run if a round receives fewer updates than this.",
        "max_norm_ratio": "Reject updates whose norm exceeds the usual one by more than this "
        "factor; 0: no bound.",
        "aggregation": "How updates are merged: mean, or the median or trimmed mean of each "
        "coordinate, for methods whose clients send the same coordinates.",
        "buffers": "What happens to the running statistics of batch normalization: average, local "
        "(each client keeps its own) or frozen.",
    },
    "Differential privacy": {
        "dp_clip": "Largest L2 norm of a client's update of W; larger ones are scaled down. "
        "0: no differential privacy.",
        "dp_clip_m": "The same for M, for methods that send it.",
        "dp_clip_v": "The same for V, for methods that send it.",
        "dp_noise": "Standard deviation of the noise on the sum, divided by the clip; 0: as much "
        "as dp-epsilon needs.",
        "dp_epsilon": "Budget: stop before a round that would exceed it; 0: no budget.",
        "dp_delta": "The delta for which epsilon is computed.",
    },
    "Secure aggregation": {
        "secure": "The server gets the sum of the clients' values only; every message of the "
        "protocol is built and counted.",
        "secure_neighbors": "Clients with which each client masks its values; 0: all up to 64 "
        "clients, then as few as are safe.",
        "secure_threshold": "Neighbors that must take part, and that restore the mask of a lost "
        "client; 0: three fifths of them, plus one.",
    },
    "Language models": {
        "lora_rank": "Rank of the LoRA adapters; 0 trains the whole model.",
        "lora_alpha": "LoRA multiplies the adapters' product by alpha / rank.",
        "lora_targets": "Names of the layers with adapters, separated by commas; all-linear: every "
        "linear layer but the output layer.",
        "lora_dropout": "Dropout before the adapters.",
        "block_length": "Tokens per sample.",
        "gradient_checkpointing": "Compute activations again in the backward pass, which saves "
        "memory.",
    },
    METHOD_PANEL: {},
    "Execution": {
        "seed": "Seed of the weights, the partition, the cohorts and the mini-batches.",
        "device": "auto, cpu or cuda; auto uses CUDA if it is available.",
        "client_tests": "Also measure the accuracy on each client: on the test set, weighted by "
        "the classes of the client's data. Of text by author: the perplexity on each author.",
        "num_workers": "Processes that fetch the items of your own Datasets ahead of their use.",
        "precision": "On a GPU: fp32, tf32 or bf16.",
        "wire": "count measures every message; real also encodes and decodes it.",
        "tensorboard": "Also write TensorBoard events to the run folder.",
        "keep_checkpoints": "Number of checkpoints to keep, to which fedsift rollback can return.",
    },
}
"""The options of a run by panel of ``--help``, each with its help text."""


def with_run_options(
    command: Callable[..., None],
    defaults: Mapping[str, Any] = DEFAULTS,
    without: Container[str] = (),
) -> Callable[..., None]:
    """Add every option of a run to a command; the options set go to its argument ``given``."""
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "given"]
    shared = [p for p in run_parameters(defaults) if p.name not in without]
    names = [p.name for p in own]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        arguments = {name: values.pop(name) for name in names}
        command(**arguments, given={name: x for name, x in values.items() if x is not None})

    wrapped.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    del wrapped.__wrapped__  # otherwise typer reads the signature without the options
    return wrapped


def run_parameters(defaults: Mapping[str, Any]) -> Iterator[Parameter]:
    """Yield a parameter for each option of a run, panel by panel."""
    types = {key: TYPES[about["type"]] for key, about in catalog()["run"].items()}
    for panel, options in PANELS.items():
        if panel == METHOD_PANEL:
            yield from method_parameters()
        for name, text in options.items():
            shown = False if types[name] is bool else str(defaults[name])
            yield option_parameter(name, types[name], text, shown, panel)


def method_parameters() -> Iterator[Parameter]:
    """Yield a parameter for each setting that any method has, the most common ones first."""
    uses: dict[str, dict[str, dict[str, Any]]] = {}
    for method in (*catalog()["methods"], *catalog()["wrappers"]):
        for setting in method["settings"]:
            uses.setdefault(setting["name"], {})[method["name"]] = setting
    for name, by_method in sorted(uses.items(), key=lambda item: -len(item[1])):
        kind = next(iter(by_method.values()))["type"]
        default = default_text({method: x["default"] for method, x in by_method.items()})
        yield setting_parameter(name, kind, setting_help(by_method), default)


def setting_help(by_method: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe a setting and its range: what it means to most methods, then to the others.

    >>> setting_help({"sift": {"help": "Bound on the norm", "range": "a positive number"}})
    'sift: Bound on the norm; a positive number.'
    """
    methods_by_text: dict[str, list[str]] = {}
    for method, setting in by_method.items():
        text = "; ".join(part for part in (setting["help"], setting["range"]) if part)
        methods_by_text.setdefault(f"{text}.", []).append(method)
    return " ".join(
        text if len(methods) > FEW else f"{', '.join(methods)}: {text}"
        for text, methods in sorted(methods_by_text.items(), key=lambda item: -len(item[1]))
    )


def default_text(by_method: Mapping[str, Value]) -> str:
    """Return the most common default of a setting, then the methods with another.

    >>> default_text({"fedadam": 0.001, "fedsgd": 0.001, "onebit-adam": 0.0001})
    '0.001; onebit-adam: 0.0001'
    """
    shown = {method: shown_value(value) for method, value in by_method.items()}
    values = list(shown.values())
    common = max(values, key=values.count)
    others = [f"{method}: {value}" for method, value in shown.items() if value != common]
    return "; ".join([common, *others])


def shown_value(value: Value) -> str:
    """Return a setting's value as it is written on the command line.

    >>> [shown_value(value) for value in (0.001, None, True)]
    ['0.001', 'none', 'true']
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


class SettingText(click.ParamType):  # type: ignore[type-arg]
    """A setting of a method: a number, or a text such as ``cosine(0.1)``, which is read later."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: Any, context: Any) -> Value:
        """Return a number if the text is one, else true, false or the text."""
        if self.name == "true|false" and value in ("true", "false"):
            return bool(value == "true")
        if self.name == "text":
            return str(value)
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
        return str(value)


SETTING_TYPES = {
    "int": SettingText("integer"),
    "float": SettingText("float"),
    "bool": SettingText("true|false"),
    "str": SettingText("text"),
}


def setting_parameter(name: str, kind: str, text: str, default: str) -> Parameter:
    """Return an optional keyword parameter for a setting of a method."""
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=text,
        show_default=default,
        rich_help_panel=METHOD_PANEL,
        click_type=SETTING_TYPES[kind],
    )
    annotation = Annotated[str | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def option_parameter(
    name: str, kind: type, text: str, shown_default: str | bool, panel: str
) -> Parameter:
    """Return an optional keyword parameter that typer turns into an option."""
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag, help=text, show_default=shown_default, rich_help_panel=panel)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def option(flag: str, text: str, shown_default: bool | str = True, **more: Any) -> Any:
    """Declare an option of one command; ``shown_default`` replaces its default in the help."""
    return typer.Option(flag, help=text, show_default=shown_default, **more)


def path(text: str) -> Path:
    """Return a path; refuse an empty one, which an unset shell variable can cause."""
    if not text:
        raise click.BadParameter("it is empty: leave the option out, or name a path")
    return Path(text)


Method = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        help=f"One of: {METHOD_NAMES}. {NAMING} {OTHER_METHODS}",
        show_default="fedadam-ssm",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Your own data instead of a data set: package.module:function, which returns "
        "(clients, test) or (clients, test, client_tests).",
        rich_help_panel="Data and model",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with the same keys; flags take precedence."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", parser=path, help="Folder for the results.", show_default="a new one in runs/"
    ),
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
