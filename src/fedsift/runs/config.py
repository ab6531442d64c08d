"""The configuration of a run: the options of ``fedsift run``, also keys of a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import tomli_w
import torch

from fedsift.algorithms import Algorithm, Method, find, for_rounds, normalized_name
from fedsift.algorithms.buffers import BUFFERS
from fedsift.algorithms.settings import GivenSetting, written
from fedsift.data import DATASETS, shape_of
from fedsift.data.authors import AUTHORS, is_text
from fedsift.errors import ConfigError, require_choice
from fedsift.federation.norm_bound import MAX_NORM_RATIO
from fedsift.llm import TINY
from fedsift.models import MODELS, default_model
from fedsift.privacy import DifferentialPrivacy, SecureSettings
from fedsift.privacy.robust import AGGREGATIONS, Aggregation
from fedsift.runs.language import (
    LANGUAGE_SETTINGS,
    check_language_settings,
    is_language_model,
)
from fedsift.simulation import chosen_device
from fedsift.task import WEIGHTS, Weights
from fedsift.task.user_code import LANGUAGE_MODEL, is_user_code

DEVICES = ("auto", "cpu", "cuda")
KEEP_CHECKPOINTS = 5
"""Number of checkpoints that are kept by default."""
MAY_CHANGE = frozenset({"rounds", "keep_checkpoints", "num_workers"})
"""Settings that may change when a run is continued. They do not affect its rounds."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run; ``settings`` holds those of the algorithm (lr, density, …).

    A setting may be a schedule, or its text as in a TOML file.

    >>> RunConfig.from_values({"algorithm": "fedsgd", "lr": 0.1}).settings
    {'lr': 0.1}
    """

    algorithm: str = "fedadam-ssm"
    dataset: str = "digits"
    model: str = "auto"
    clients: int = 20
    rounds: int = 30
    batch_size: int = 64
    weights: str = "auto"
    partition: str = "iid"
    theta: float = 0.1
    validation: float = 0.0
    participation: float = 1.0
    dropout: float = 0.0
    min_clients: int = 0
    max_norm_ratio: float = MAX_NORM_RATIO
    buffers: str = "average"
    aggregation: str = "mean"
    dp_clip: float = 0.0
    dp_clip_m: float = 0.0
    dp_clip_v: float = 0.0
    dp_noise: float = 0.0
    dp_epsilon: float = 0.0
    dp_delta: float = 1e-5
    secure: bool = False
    secure_neighbors: int = 0
    secure_threshold: int = 0
    wire: str = "count"
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    loss: str = "auto"
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_targets: str = "all-linear"
    lora_dropout: float = 0.0
    block_length: int = 128
    gradient_checkpointing: bool = False
    client_tests: bool = False
    num_workers: int = 0
    tensorboard: bool = False
    keep_checkpoints: int = KEEP_CHECKPOINTS
    settings: Mapping[str, GivenSetting] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RunConfig:
        """Create a configuration from flat keys, as in a TOML file, and check it.

        The key ``data`` names the user's own data, and is recorded as the data set.
        """
        if values.get(MADE_FROM) == PYTHON:
            raise ConfigError("this configuration is of a run made from Python: run its code")
        values = with_user_data(values)
        types = {f.name: str(f.type) for f in fields(cls) if f.name != "settings"}
        common = {key: as_type(key, values[key], types[key]) for key in values if key in types}
        if "algorithm" in common:
            common["algorithm"] = normalized_name(common["algorithm"])
        for key in common.keys() & {"dataset", "model"}:
            if ":" not in common[key]:
                common[key] = common[key].replace("_", "-")
        config = cls(**common, settings={k: v for k, v in values.items() if k not in types})
        config.check_names()
        if config.model == "auto" and is_text(config.dataset):
            config = replace(config, model=LANGUAGE_MODEL + TINY)
        if config.model == "auto" and not is_user_code(config.dataset):
            config = replace(config, model=default_model(shape_of(config.dataset)))
        config.check_numbers()
        check_language_settings(config)
        algorithm = config.make_algorithm()
        weights = config.chosen_weights() or algorithm.weights
        if (privacy := config.privacy) is None:
            return replace(config, weights=weights)
        calibrated = privacy.calibrated(
            1.0 if config.secure else config.participation, config.rounds
        )
        return replace(config, weights="equal", dp_noise=calibrated.multiplier)

    def check_names(self) -> None:
        """Refuse unknown names, except those of the data and model of a Flower app."""
        find(self.algorithm)
        require_choice("device", self.device, DEVICES)
        require_choice("buffers", self.buffers, BUFFERS)
        require_choice("aggregation", self.aggregation, AGGREGATIONS)
        require_choice("weights", self.weights, ("auto", *WEIGHTS))
        if self.wire != "flower":
            if not is_user_code(self.dataset):
                if not is_text(self.dataset):
                    require_choice("dataset", self.dataset, [*DATASETS, *AUTHORS])
            elif self.model == "auto":
                raise ConfigError(
                    "own data needs a model: give --model package.module:factory, or one of "
                    f"{', '.join(MODELS)} if its inputs fit"
                )
            if not is_user_code(self.model) and not is_language_model(self.model):
                require_choice("model", self.model, ["auto", *MODELS])
            if self.loss != "auto" and not is_user_code(self.loss):
                raise ConfigError(
                    f"loss must be auto or package.module:function, got {self.loss!r}"
                )

    def check_numbers(self) -> None:
        """Refuse numbers out of range."""
        check_keep_checkpoints(self.keep_checkpoints)
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds}")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation must be in [0, 1), got {self.validation}")
        if self.validation and (is_user_code(self.dataset) or is_text(self.dataset)):
            raise ConfigError(
                "validation holds out samples of a built-in data set: leave it out, and give the "
                "held-out samples as the test set"
            )
        if self.batch_size < 0:
            raise ConfigError(
                f"batch-size must be at least 1, or 0 for the whole local set, "
                f"got {self.batch_size}"
            )

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """Read a configuration from a TOML file."""
        return cls.from_values(read_values(path))

    def flat(self) -> dict[str, Any]:
        """Return every key with its value, including the algorithm's defaults."""
        left_out = {"settings", *(() if is_language_model(self.model) else LANGUAGE_SETTINGS)}
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        settings = self.make_algorithm().settings
        return {**common, **{key: written(value) for key, value in settings.items()}}

    def toml(self) -> str:
        """Return the TOML file that reproduces this run."""
        return tomli_w.dumps(self.flat())

    def with_rounds(self, rounds: int) -> RunConfig:
        """Return the configuration with another number of rounds."""
        return replace(self, rounds=rounds)

    def make_algorithm(self) -> Algorithm:
        """Create the algorithm with its settings, and its schedules for the number of rounds."""
        method = find(self.algorithm)
        self.check_settings(method)
        given = {key: method.settings[key].read(value) for key, value in self.settings.items()}
        try:
            return for_rounds(method(**given), self.rounds)
        except Exception as problem:
            if isinstance(problem, ValueError) or not is_user_code(self.algorithm):
                raise
            raise ConfigError(f"algorithm {self.algorithm!r} fails: {problem}") from None

    def check_settings(self, method: Method) -> None:
        """Refuse settings that the method does not have, and require those without a default."""
        known = method.settings
        for key in self.settings:
            if key not in known:
                raise ConfigError(
                    f"{self.algorithm} has no setting {_flag(key)!r}; it has: "
                    f"{', '.join(map(_flag, known))} (and every run: "
                    f"{', '.join(_flag(f.name) for f in fields(self) if f.name != 'settings')})"
                )
        for key, setting in known.items():
            if key in RunConfig.__dataclass_fields__:
                raise ConfigError(
                    f"{self.algorithm} has a setting {_flag(key)!r}, which is an option of every "
                    "run: give the setting another name"
                )
            if setting.is_required and key not in self.settings:
                raise ConfigError(f"{self.algorithm} needs the setting {_flag(key)!r}")

    @property
    def privacy(self) -> DifferentialPrivacy | None:
        """Differential privacy, if a bound on the clients' updates is given."""
        clips = {"w": self.dp_clip, "m": self.dp_clip_m, "v": self.dp_clip_v}
        given = {role: clip for role, clip in clips.items() if clip}
        if not given:
            if self.dp_noise or self.dp_epsilon:
                raise ConfigError("differential privacy needs a bound on the updates: set dp-clip")
            return None
        if self.weights not in ("auto", "equal"):
            raise ConfigError(f"differential privacy needs weights equal, got {self.weights}")
        clip = self.dp_clip if list(given) == ["w"] else given
        noise, epsilon = self.dp_noise or None, self.dp_epsilon or None
        return DifferentialPrivacy(clip, noise, epsilon, self.dp_delta)

    @property
    def secure_settings(self) -> bool | SecureSettings:
        """The settings of secure aggregation; False for none."""
        return self.secure and SecureSettings(self.secure_neighbors, self.secure_threshold)

    def chosen_weights(self) -> Weights | None:
        """Return the clients' weights in the mean; None if they are the algorithm's own."""
        return None if self.weights == "auto" else cast(Weights, self.weights)

    def chosen_aggregation(self) -> Aggregation:
        """Return how updates are merged."""
        return cast(Aggregation, self.aggregation)

    def torch_device(self) -> str:
        """Return the device to train on: cpu or cuda."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("this machine has no usable CUDA device: use --device cpu")
        return str(chosen_device(self.device))


def with_user_data(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a run on own data, given as ``data`` or recorded as the data set.

    >>> with_user_data({"data": "my_data:load", "seed": 1})
    {'seed': 1, 'dataset': 'my_data:load', 'partition': 'own', 'clients': 0}
    """
    values = dict(values)
    if (data := values.pop("data", None)) is not None:
        check_type("data", data, "str")
        if not is_user_code(data):
            raise ConfigError(f"data must be package.module:function, got {data!r}")
        if "dataset" in values:
            raise ConfigError("give either data, for your own, or dataset, for a built-in one")
        values["dataset"] = data
    if not is_user_code(str(values.get("dataset", ""))):
        return values
    if values.get("partition", "own") != "own":
        raise ConfigError("partition does not apply to own data, which is split already")
    # 0 clients: as many as the function returns.
    return {**values, "partition": "own", "clients": values.get("clients", 0)}


@dataclass(frozen=True)
class PythonConfig:
    """The configuration of a run made by ``fedsift.simulate``, whose code alone can continue it.

    ``values`` are the keys of its config.toml.
    """

    values: Mapping[str, Any]

    @property
    def rounds(self) -> int:
        """Number of communication rounds in total."""
        return int(self.values["rounds"])

    @property
    def dataset(self) -> str:
        """The name of the data, with a hash of it."""
        return str(self.values["dataset"])

    @property
    def wire(self) -> str:
        """How messages travel."""
        return str(self.values["wire"])

    @property
    def keep_checkpoints(self) -> int:
        """Number of checkpoints to keep; 1 for a result that was saved as a folder."""
        return int(self.values.get("keep_checkpoints", 1))

    def flat(self) -> dict[str, Any]:
        """Return every key with its value."""
        return dict(self.values)

    def toml(self) -> str:
        """Return the TOML file that describes this run."""
        return tomli_w.dumps(self.values)

    def torch_device(self) -> str:
        """Return the device that the run trains on: cpu or cuda."""
        return str(self.values["device"])

    def with_rounds(self, rounds: int) -> PythonConfig:
        """Return the configuration with another number of rounds."""
        return PythonConfig({**self.values, "rounds": rounds})


Config = RunConfig | PythonConfig
MADE_FROM, PYTHON = "made_from", "python"
"""The key of config.toml that marks a run made from Python, and its value."""


def check_keep_checkpoints(number: int) -> None:
    """Check that at least one checkpoint is kept.

    >>> check_keep_checkpoints(0)
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: keep_checkpoints must be a whole number of at least 1, got 0
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"keep_checkpoints must be a whole number of at least 1, got {number!r}")


def read_config(path: Path) -> Config:
    """Read the configuration of a run, made on the command line or from Python."""
    values = read_values(path)
    if values.get(MADE_FROM) == PYTHON:
        return PythonConfig(values)
    return RunConfig.from_values(values)


def read_values(path: Path) -> dict[str, Any]:
    """Read the keys of a TOML file; ``local-steps`` and ``local_steps`` are the same key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
    spelling: dict[str, str] = {}
    for key in values:
        other = spelling.setdefault(key.replace("-", "_"), key)
        if other != key:
            raise ConfigError(f"{path} has both {other!r} and {key!r}, which are the same key")
    return {name: values[key] for name, key in spelling.items()}


def as_type(key: str, value: Any, type_name: str) -> Any:
    """Return a value of the given type; whole numbers are also floats."""
    check_type(key, value, type_name)
    try:
        return float(value) if type_name == "float" else value
    except OverflowError:
        raise ConfigError(f"{_flag(key)} is too large for a number") from None


def check_type(key: str, value: Any, type_name: str) -> None:
    """Refuse a value that is not of the given type."""
    kinds: dict[str, tuple[str, tuple[type, ...]]] = {
        "int": ("a whole number", (int,)),
        "float": ("a number", (int, float)),
        "str": ("a string", (str,)),
        "bool": ("true or false", (bool,)),
    }
    word, kind = kinds[type_name]
    if not isinstance(value, kind) or (isinstance(value, bool) and type_name != "bool"):
        raise ConfigError(f"{_flag(key)} must be {word}, got {value!r}")


def _flag(key: str) -> str:
    return key.replace("_", "-")
