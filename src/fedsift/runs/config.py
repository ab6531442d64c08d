"""What defines a run: every flag of ``fedsift run``, and the same keys in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedsift.algorithms import Algorithm, find, settings_of
from fedsift.data import shape_of
from fedsift.errors import ConfigError
from fedsift.federation.norm_bound import MAX_NORM_RATIO
from fedsift.models import default_model
from fedsift.simulation import chosen_device

Setting = float | int
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class RunConfig:
    """A run's configuration. ``settings`` holds what belongs to the algorithm (lr, density, …).

    >>> RunConfig.from_values({"algorithm": "fedsgd", "lr": 0.1}).settings
    {'lr': 0.1}
    """

    algorithm: str = "fedadam-ssm"
    dataset: str = "digits"
    model: str = "auto"
    clients: int = 20
    rounds: int = 30
    batch_size: int = 64
    partition: str = "iid"
    theta: float = 0.1
    participation: float = 1.0
    dropout: float = 0.0
    min_clients: int = 0
    max_norm_ratio: float = MAX_NORM_RATIO
    wire: str = "count"
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    tensorboard: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RunConfig:
        """From flat keys as they stand in a TOML file or come from the command line."""
        own = {f.name: str(f.type) for f in fields(cls) if f.name != "settings"}
        common = {key: value for key, value in values.items() if key in own}
        for key, value in common.items():
            check_type(key, value, own[key])
            try:
                common[key] = float(value) if own[key] == "float" else value
            except OverflowError:
                raise ConfigError(f"{_flag(key)} is too large for a number") from None
        if "algorithm" in common:
            common["algorithm"] = common["algorithm"].replace("_", "-")
        config = cls(**common, settings={k: v for k, v in values.items() if k not in own})
        if config.model == "auto":
            config = replace(config, model=default_model(shape_of(config.dataset)))
        config.make_algorithm()
        if config.device not in DEVICES:
            raise ConfigError(
                f"unknown device {config.device!r}; choose one of: {', '.join(DEVICES)}"
            )
        if config.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {config.seed}")
        if config.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {config.rounds}")
        if config.batch_size < 0:
            raise ConfigError(
                f"batch-size must be at least 1, or 0 for the whole local set, "
                f"got {config.batch_size}"
            )
        return config

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """From a TOML file."""
        return cls.from_values(read_values(path))

    def flat(self) -> dict[str, Any]:
        """Every key with its value, the algorithm's defaults filled in."""
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return {**common, **self.make_algorithm().settings}

    def toml(self) -> str:
        """The TOML file that makes this run again."""
        return tomli_w.dumps(self.flat())

    def make_algorithm(self) -> Algorithm:
        """The algorithm with its settings, checked."""
        known = settings_of(self.algorithm)
        for key in self.settings:
            if key not in known:
                raise ConfigError(
                    f"{self.algorithm} has no setting {_flag(key)!r}; it has: "
                    f"{', '.join(map(_flag, known))} (and every run: "
                    f"{', '.join(_flag(f.name) for f in fields(self) if f.name != 'settings')})"
                )
        return find(self.algorithm)(**self.settings)

    def torch_device(self) -> str:
        """The device that is meant, ``auto`` resolved."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("this machine has no usable CUDA device; use --device cpu")
        return str(chosen_device(self.device))


def read_values(path: Path) -> dict[str, Any]:
    """A TOML file's keys, in the spelling of Python (``local_steps``); dashes are welcome too."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
    spelt: dict[str, str] = {}
    for key in values:
        known = spelt.setdefault(key.replace("-", "_"), key)
        if known != key:
            raise ConfigError(f"{path} has both {known!r} and {key!r}, which are one key")
    return {name: values[key] for name, key in spelt.items()}


def check_type(key: str, value: Any, wanted: str) -> None:
    """Refuse a value that is not of its key's type."""
    kinds: dict[str, tuple[str, tuple[type, ...]]] = {
        "int": ("a whole number", (int,)),
        "float": ("a number", (int, float)),
        "str": ("a word", (str,)),
        "bool": ("true or false", (bool,)),
    }
    word, kind = kinds[wanted]
    if not isinstance(value, kind) or (isinstance(value, bool) and wanted != "bool"):
        raise ConfigError(f"{_flag(key)} must be {word}, got {value!r}")


def _flag(key: str) -> str:
    return key.replace("_", "-")
