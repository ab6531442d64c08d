"""The method, which server and clients share, and the strategy."""

from flwr.app import UserConfig

from fedsift.algorithms import Algorithm, find, settings_of
from fedsift.flower import FedSift

SETTINGS = ("lr", "density", "local-steps")


def make_algorithm(config: UserConfig) -> Algorithm:
    """Return the method of the run config, with those of its settings that the method has."""
    name = str(config["algorithm"])
    given = {key.replace("-", "_"): config[key] for key in SETTINGS}
    known = settings_of(name)
    return find(name)(**{key: value for key, value in given.items() if key in known})


def make_strategy(config: UserConfig) -> FedSift:
    """Return the strategy of the run config."""
    return FedSift(
        make_algorithm(config),
        int(config["num-clients"]),
        str(config["folder"]),
        batch_size=int(config["batch-size"]),
        seed=int(config["seed"]),
        dataset=str(config["dataset"]),
        partition=str(config["partition"]),
        theta=float(config["theta"]),
    )
