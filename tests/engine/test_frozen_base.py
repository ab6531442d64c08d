"""A large frozen base exists once, whatever trains the rest of the model."""

import torch
from stacked_models import Embedded, after_two_rounds, federation, text
from torch import nn

from fedsift.engine import Forked, Reference
from fedsift.engine.client import Trainer


def frozen_base():
    torch.manual_seed(0)
    model = Embedded(nn.LayerNorm(32))
    model.embedding.requires_grad_(False)
    return model


def test_a_trainer_uses_the_frozen_parameters_of_the_task():
    fed = federation(frozen_base(), *text())
    ours, theirs = (dict(m.named_parameters()) for m in (Trainer(fed.task).model, fed.task.model))
    shared = {name for name, p in ours.items() if p is theirs[name]}
    assert shared == {"embedding.weight"}


def test_processes_with_a_shared_base_give_the_bits_of_one():
    fed = federation(frozen_base(), *text(), device="cpu")
    before = fed.task.model.embedding.weight.clone()
    engine = Forked(fed.task, fed.algorithm, processes=2)
    assert engine.start_pool() is not None
    ours = after_two_rounds(fed, engine)
    theirs = after_two_rounds(fed, Reference(fed.task))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert torch.equal(fed.task.model.embedding.weight, before)
