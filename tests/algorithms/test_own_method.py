"""Mistakes in a custom method give errors that name them."""

import re
from pathlib import Path

import pytest
from torch.nn.functional import mse_loss

import fedsift
from fedsift import algorithms
from fedsift.algorithms import METHODS, Algorithm, Phase, method
from fedsift.algorithms.method import always
from fedsift.codec.update import dense
from problems import ridge


@pytest.fixture(autouse=True)
def _forget():
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def train(send, **memories):
    @method("slip")
    def slip() -> Algorithm:
        phase = Phase(1, lambda x, gradient, context: x, send, paper_bits=lambda d: 32.0 * d)
        return Algorithm(always(phase), **memories)

    problem = ridge(0)
    return fedsift.simulate(
        problem.model, problem.clients, algorithm=slip(), rounds=1, batch_size=None, loss=mse_loss
    )


def parts_of(update):
    return dense({"w": update.delta_w})


@pytest.mark.parametrize(
    ("send", "said"),
    [
        (lambda context, update, memory: parts_of(update), "and a memory"),
        (lambda context, update, memory: (update.end.w, {}), r"made by sparse\(\) or dense\(\)"),
        (
            lambda context, update, memory: (parts_of(update), {"rest": update.end.w}),
            "send returned memory named rest; the method declares nothing",
        ),
    ],
)
def test_what_send_returns_is_checked(send, said):
    with pytest.raises((TypeError, ValueError), match=said):
        train(send)


def test_a_declared_memory_must_be_kept():
    with pytest.raises(
        ValueError, match="send returned memory named nothing; the method declares rest"
    ):
        train(lambda context, update, memory: (parts_of(update), {}), client_memory=("rest",))


def test_a_method_must_return_an_algorithm():
    @method("forgetful")
    def forgetful():
        pass

    with pytest.raises(TypeError, match="'forgetful' must return an Algorithm"):
        forgetful()


def test_a_built_in_method_keeps_its_name():
    with pytest.raises(ValueError, match="'sift' is a built-in method"):
        method("sift")(lambda: None)
    assert METHODS["sift"].make is algorithms.sift.__wrapped__


def test_the_guide_starts_with_fifteen_lines_and_imports_from_one_place():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "own-method.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len([line for line in blocks[0].splitlines() if line]) <= 15
    modules = set(re.findall(r"^from (fedsift[\w.]*)", "".join(blocks), re.MULTILINE))
    assert modules == {"fedsift", "fedsift.algorithms"}


def test_a_custom_method_may_be_redefined():
    for _ in range(2):
        train(lambda context, update, memory: (parts_of(update), {}))
