"""What a run trains: the model, the clients' data, the test set and the loss."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsift.data import Dataset, load, partition_indices, split, with_validation_split
from fedsift.data.authors import is_text
from fedsift.data.user_data import load_user_data
from fedsift.engine.client_tests import BY_CLASS
from fedsift.errors import ConfigError
from fedsift.llm import TextClients, load_clients, load_tokenizer, next_token_loss
from fedsift.llm.blocks import document_numbers, joined
from fedsift.models import build
from fedsift.runs.config import RunConfig
from fedsift.runs.language import is_language_model, language_model, model_name
from fedsift.task import Loss
from fedsift.task.samples import as_data, first_samples
from fedsift.task.threads import one_thread
from fedsift.task.user_code import import_function, is_user_code


@dataclass(frozen=True)
class Parts:
    """What a run trains: the model, the data of each client, the test set and the loss.

    ``client_tests`` are the test data of each client, or what ``simulate`` takes in their place.
    """

    model: nn.Module
    clients: Sequence[Any]
    test: Any
    loss: Loss
    client_tests: Sequence[Any] | str | None = None


def parts_of(config: RunConfig, dataset: Dataset | None = None) -> Parts:
    """Return what a configuration describes; its built-in data set may be given."""
    if is_text(config.dataset):
        return text_parts(config)
    return user_parts(config) if is_user_code(config.dataset) else built_in_parts(config, dataset)


def built_in_parts(config: RunConfig, dataset: Dataset | None) -> Parts:
    """Load a built-in data set unless it is given, and split it across clients."""
    dataset = dataset or load(config.dataset)
    if config.validation:
        number = int(config.validation * len(dataset.labels))
        dataset = with_validation_split(dataset, number, config.seed)
    if config.client_tests and dataset.documents is not None:
        raise ConfigError(
            f"client-tests weights the test set by class, and the clients of {config.dataset} "
            "differ in more than that: it is for data sets with classes"
        )
    rows = partition_indices(
        config.partition, dataset.labels, config.clients, config.seed, config.theta
    )
    with one_thread():  # threads slow down thousands of tiny copies
        clients = split(dataset.train, rows)
    model, loss = built_in_model(config, dataset)
    client_tests = BY_CLASS if config.client_tests else None
    return Parts(model, clients, dataset.test, loss, client_tests)


def text_parts(config: RunConfig) -> Parts:
    """Read a text by author, and split it across clients: one author each, or pieces of all."""
    tokenizer = load_tokenizer(model_name(config))
    of_authors = config.partition == "documents"
    if config.client_tests and not of_authors:
        raise ConfigError("client-tests of text needs one author per client: --partition documents")
    number = config.clients if of_authors else None
    found = load_clients(config.dataset, tokenizer, number, config.block_length)
    return Parts(
        language_model(config),
        found.clients if of_authors else mixed(found, config),
        found.test,
        chosen_loss(config.loss, next_token_loss),
        found.client_tests if config.client_tests else None,
    )


def mixed(found: TextClients, config: RunConfig) -> Sequence[Any]:
    """Split the blocks of all authors across clients; authors are what classes are for images."""
    authors = document_numbers(found.clients).numpy()
    rows = partition_indices(config.partition, authors, config.clients, config.seed, config.theta)
    with one_thread():
        return split(joined(found.clients), rows)


def built_in_model(config: RunConfig, dataset: Dataset) -> tuple[nn.Module, Loss]:
    """Return the model and the loss for a built-in data set."""
    model = build(config.model, dataset.shape, config.seed, dataset.dtype)
    loss = chosen_loss(config.loss, dataset.loss)
    check_output(model, dataset, config.model, loss)
    return model, loss


def user_parts(config: RunConfig) -> Parts:
    """Call the user's function for the data, and build the model."""
    found = load_user_data(config.dataset, config.seed, config.clients)
    x, _ = first_samples(as_data("client 0", found.clients[0], "cpu", torch.get_default_dtype()))
    known = (tuple(x.shape[1:]), x.dtype) if isinstance(x, Tensor) else (None, torch.float32)
    is_language = is_language_model(config.model)
    model: nn.Module = (
        language_model(config)
        if is_language
        else build(config.model, known[0], config.seed, known[1])
    )
    loss = chosen_loss(config.loss, next_token_loss if is_language else cross_entropy)
    if config.client_tests and found.client_tests is not None:
        raise ConfigError(
            f"data {config.dataset!r} returns test data of each client: leave out --client-tests"
        )
    client_tests = BY_CLASS if config.client_tests else found.client_tests
    return Parts(model, found.clients, found.test, loss, client_tests)


def chosen_loss(name: str, default: Loss) -> Loss:
    """Return the user's loss, or the default for ``auto``."""
    return default if name == "auto" else import_function("loss", name)


def check_output(model: nn.Module, dataset: Dataset, name: str, loss: Loss) -> None:
    """Refuse a model whose output does not fit the labels of the data set."""
    (x, y), (_, tested) = dataset.train, dataset.test
    largest = torch.full_like(y[:2], max(int(y.max()), int(tested.max())))
    try:
        with torch.no_grad():
            loss(copy.deepcopy(model)(x[:2]), largest)  # a copy, as buffers may change
    except Exception as problem:  # a user's model may raise anything
        raise ConfigError(
            f"the output of model {name!r} does not fit labels from 0 to {int(largest.max())}: "
            f"{problem}"
        ) from None
