"""What is pinned: each table's and figure's runs, read from the TOML files in ``pinned/``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedsift.runs.compare import config_of
from fedsift.runs.config import RunConfig

FOLDER = Path(__file__).parent / "pinned"
PINS = ("table1", *(f"fig{n}" for n in range(1, 9)), "sift")
"""Every table and figure by its command-line name; the last is not of the paper."""


@cache
def read(name: str) -> dict[str, Any]:
    """A pinned file.

    >>> sorted(read("paper"))
    ['cnn-fashion-mnist', 'resnet18-svhn', 'vgg11-cifar10']
    """
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Wanted:
    """What a user asks for: None leaves the choice to the pinned file.

    ``task`` may name several, separated by commas.
    """

    task: str | None = None
    setting: str | None = None
    methods: tuple[str, ...] = ()
    seeds: int = 3
    rounds: int | None = None
    quick: bool = False
    device: str = "auto"
    precision: str = "fp32"


@dataclass(frozen=True)
class Planned:
    """One run of a table or figure. Runs that two figures share have one path."""

    task: str
    setting: str
    label: str
    config: RunConfig
    target: float
    measures_updates: bool = False
    quick: bool = False

    @property
    def path(self) -> Path:
        """Where it lies below the folder of all runs."""
        folder = "updates" if self.measures_updates else self.label
        return Path(self.task, self.setting, folder, f"seed-{self.config.seed}")


@dataclass(frozen=True)
class Pin:
    """A table or figure: what is drawn, and the lines it draws for each task and setting."""

    name: str
    title: str
    kind: str
    x: str
    tasks: tuple[str, ...]
    settings: tuple[str, ...]
    lines: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, name: str) -> Pin:
        """The pin of that name.

        >>> Pin.of("fig7").lines[0]
        {'algorithm': 'fedadam-ssm', 'lr': 0.0001}
        """
        if name not in PINS:
            raise ValueError(f"unknown table or figure {name!r}; choose one of: {', '.join(PINS)}")
        values = read(name)
        lists = {key: tuple(values[key]) for key in ("tasks", "settings", "lines")}
        return cls(**{**values, **lists, "name": name})


def plan(pin: Pin, wanted: Wanted) -> list[Planned]:
    """Every run of a table or figure that is asked for, the seeds of a line together.

    >>> runs = plan(Pin.of("fig5"), Wanted(task="cnn-fashion-mnist", setting="iid", seeds=1))
    >>> [run.label for run in runs]
    ['fedadam-ssm@local_steps=3', 'fedadam-ssm@local_steps=10', 'fedadam-ssm', \
'fedadam-ssm@local_steps=100']
    """
    if wanted.seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {wanted.seeds}")
    tasks = _chosen("task", wanted.task, pin.tasks)
    # Fig. 4 is about the settings: it always has all of them.
    settings = pin.settings if pin.kind == "settings" else _settings(pin, wanted)
    lines = _lines(pin, wanted.methods)
    return [
        run
        for task in tasks
        for setting in settings
        for line in lines
        for run in _line(pin, task, setting, line, wanted)
    ]


def split(names: str) -> tuple[str, ...]:
    """A list with commas.

    >>> split("iid, noniid")
    ('iid', 'noniid')
    """
    return tuple(name for each in names.split(",") if (name := each.strip()))


def _chosen(what: str, names: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = known if names is None else split(names)
    for name in chosen:
        if name not in known:
            is_elsewhere = what == "task" and name in read("tasks")["tasks"]
            problem = (
                f"{name!r} is no task of this one" if is_elsewhere else f"unknown {what} {name!r}"
            )
            raise ValueError(f"{problem}; choose one of: {', '.join(known)}")
    return chosen


def _settings(pin: Pin, wanted: Wanted) -> tuple[str, ...]:
    _chosen("setting", wanted.setting, ("iid", "noniid"))
    return pin.settings if wanted.setting is None else (wanted.setting,)


def _lines(pin: Pin, methods: tuple[str, ...]) -> list[Mapping[str, Any]]:
    here = tuple(dict.fromkeys(line["algorithm"] for line in pin.lines))
    for name in methods:
        _chosen("method", name, here)
    return [line for line in pin.lines if not methods or line["algorithm"] in methods]


def _line(
    pin: Pin, task: str, setting: str, line: Mapping[str, Any], wanted: Wanted
) -> Iterator[Planned]:
    own = {key: value for key, value in line.items() if key != "algorithm"}
    for seed in range(wanted.seeds):
        values = _values(task, setting, line["algorithm"], wanted) | {"seed": seed}
        target = values.pop("target")
        config = config_of(line["algorithm"], values | own)
        usual = config_of(line["algorithm"], values).flat()
        unusual = {k: v for k, v in own.items() if usual[k] != v and k != "rounds"}
        if wanted.rounds is not None:
            config = config_of(line["algorithm"], values | own | {"rounds": wanted.rounds})
        label = _label(line["algorithm"], unusual)
        is_fig1 = pin.kind == "updates"
        yield Planned(task, setting, label, config, target, is_fig1, wanted.quick)


def _label(algorithm: str, unusual: Mapping[str, Any]) -> str:
    settings = ",".join(f"{key}={value}" for key, value in unusual.items())
    return f"{algorithm}@{settings}" if settings else algorithm


def _values(task: str, setting: str, algorithm: str, wanted: Wanted) -> dict[str, Any]:
    """A method's settings on a task, with the rounds and the target of the setting."""
    pinned, own = read("tasks"), ("methods", "quick", "settings")
    layers = [pinned["tasks"][task]]
    if wanted.quick:
        layers.append(pinned["tasks"][task]["quick"])
    values: dict[str, Any] = {"device": wanted.device, "precision": wanted.precision}
    for layer in layers:
        values |= {key: value for key, value in layer.items() if key not in own}
    for layer in layers:
        values |= layer.get("methods", {}).get(algorithm, {})
    for key in ("rounds", "target"):
        if isinstance(values[key], Mapping):  # by setting; those of Fig. 4 are kinds of non-IID
            values[key] = values[key].get(setting, values[key]["noniid"])
    own_setting = layers[0].get("settings", {}).get(setting, {})
    return {**values, **pinned["settings"][setting], **own_setting}
