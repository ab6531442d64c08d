"""The model: the paper's CNN with 21,840 parameters, and a smaller one for digits."""

from flwr.app import UserConfig
from torch import nn

from fedadam_ssm.dataset import load_dataset
from fedsift.models import build, default_model


def make_model(config: UserConfig) -> nn.Module:
    """Return the model for the data set; the seed determines its weights."""
    dataset = load_dataset(config)
    return build(default_model(dataset.shape), dataset.shape, int(config["seed"]), dataset.dtype)
