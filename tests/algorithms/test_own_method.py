"""Mistakes in a custom method give errors that name them."""

import re
from dataclasses import replace

import pytest
from torch.nn.functional import mse_loss

import fedsift
import guide
from fedsift import algorithms
from fedsift.algorithms import METHODS, Algorithm, Phase, find, method, normalized_name
from fedsift.algorithms.method import always
from fedsift.codec.update import dense, sparse
from fedsift.codec.values import Linear
from fedsift.report.styles import palette, style_of
from problems import ridge


@pytest.fixture(autouse=True)
def _forget():
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def train(send, phase=None, **given):
    """Train with a method whose step does nothing; ``phase`` has other functions."""

    @method("slip")
    def slip() -> Algorithm:
        correct = Phase(1, lambda x, gradient, context: x, send, paper_bits=lambda d: 32 * d)
        return Algorithm(always(replace(correct, **(phase or {}))), **given)

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


def send_all(context, update, memory):
    return parts_of(update), memory


PHASES = {
    "no steps": ({"local_steps": 0}, "local_steps must be a whole number of at least 1, or a func"),
    "half a step": ({"local_steps": 0.5}, "local_steps must be a whole number"),
    "a number as a function": (
        {"paper_bits": 32},
        r"paper_bits must be a function of \(d\), got 32",
    ),
    "too few parameters": (
        {"broadcast": lambda mean, memory: None},
        r"broadcast must take \(context, mean, memory\), but it takes \(mean, memory\)",
    ),
    "a vector without clients": (
        {"broadcast": lambda context, mean, memory: (dense({"w": mean.w}), memory)},
        r"w must have the shape \(clients, d\), got \(12,\): on the server, pass x\[None\]",
    ),
    "a step to a tensor": (
        {"step": lambda x, gradient, context: x.w},
        r"step must return a state with the vectors w, m, v, such as .*, got a Tensor",
    ),
    "a step to one vector": (
        {"step": lambda x, gradient, context: x.map(lambda vector: vector[0])},
        r"step returned w with the shape \(12,\); it must keep its shape \(1, 12\)",
    ),
    "a start without a state": (
        {"local_start": lambda state, memory: None},
        "local_start must return a state with at least the vectors w, m, v, got a NoneType",
    ),
    "a start without moments": (
        {"local_start": lambda state, memory: fedsift.State(w=state.w)},
        "local_start must return a state with at least the vectors w, m, v, got State",
    ),
    "a step with an unknown memory": (
        {"step": lambda x, gradient, context: x.replace(w=context.memory["rest"])},
        r"there is no memory 'rest': declare it, as in client_memory=\(\"rest\",\)",
    ),
    "an unknown memory": (
        {"send": lambda context, update, memory: (parts_of(update), {"c": memory["c"]})},
        r"there is no memory 'c': declare it, as in client_memory=\(\"c\",\)",
    ),
    "an unknown memory of the server": (
        {"broadcast": lambda context, mean, memory: ((), {"c": memory["c"]})},
        "there is no memory 'c': declare it, as in .* or in server_memory if the server keeps it",
    ),
    "numbers as a mask": (
        {"send": lambda c, update, memory: (sparse({"w": update.delta_w}, update.delta_w), memory)},
        r"a mask must be of booleans, such as top_k\(x, k\), got torch.float64",
    ),
    "a tensor as the state": (
        {"apply": lambda context, state, received: state.w},
        "apply must return a state with the vectors w, m, v, such as",
    ),
    "points without clients": (
        {"points": lambda x, context: x.w},
        r"points must yield weights of the shape \(1, 12\), got \(12,\)",
    ),
    "no points": ({"points": lambda x, context: []}, "points must yield at least one"),
    "a coder's class": (
        {"send": lambda context, update, memory: (dense({"w": update.delta_w}, Linear), memory)},
        r"a value coder must be one such as Linear\(4\) or Sign\(\), or your own after reg",
    ),
    "a payload of no length": (
        {"send": lambda context, update, memory: (dense({"p": update.delta_w[:, :2]}), memory)},
        "p has 2 coordinates, but its length is 12, which the method declares in lengths",
    ),
}


@pytest.mark.parametrize(("phase", "said"), PHASES.values(), ids=PHASES)
def test_a_mistake_in_a_phase_is_named(phase, said):
    with pytest.raises((TypeError, ValueError), match=said):
        train(send_all, phase)


DECLARED = {
    "a name as a tuple": ({"client_memory": "rest"}, r'must be a tuple of names, such as \("resid'),
    "a start of nothing": ({"server_start": {"v": 1.0}}, "server_start names 'v', but the method"),
    "a length of nothing": (
        {"lengths": {"rest": 1}},
        "lengths names 'rest', but the method declares",
    ),
    "an unknown vector": ({"state": ("w", "h")}, "must be w and some of m, v, c, in this order"),
    "no weights": ({"state": ("m",)}, "must be w and some of m, v, c, in this order"),
}


@pytest.mark.parametrize(("given", "said"), DECLARED.values(), ids=DECLARED)
def test_a_mistake_in_what_is_declared_is_named(given, said):
    with pytest.raises((TypeError, ValueError), match=said):
        train(send_all, **given)


def test_a_phase_in_place_of_a_function_of_the_round_is_refused():
    phase = algorithms.fedsgd().phase(1)
    with pytest.raises(TypeError, match=r"must be a function of the round: use always\(phase\)"):
        Algorithm(phase)


@pytest.mark.parametrize("memory", ["client_memory", "server_memory"])
def test_a_memory_keeps_its_shape(memory):
    def send(context, update, memory):
        return parts_of(update), dict.fromkeys(memory, update.delta_w[0])

    def broadcast(context, mean, memory):
        return parts_of_mean(mean), dict.fromkeys(memory, mean.w)

    def parts_of_mean(mean):
        return dense({"w": mean.w[None]})

    who = "send" if memory == "client_memory" else "broadcast"
    said = rf"{who} returned the memory h with the shape \(12,\); it must keep its shape \(1, 12\)"
    with pytest.raises(ValueError, match=said):
        train(send, {"broadcast": broadcast}, **{memory: ("h",)})


def test_epochs_are_checked():
    with pytest.raises(ValueError, match="epochs must be a whole number of at least 1, got 0"):
        algorithms.Epochs(0)


def test_a_method_of_a_module_can_be_compressed_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_methods.py").write_text(
        "from fedsift.algorithms import fedavg\n\n"
        "def my_fedavg(lr: float = 0.1):\n    return fedavg(local_steps=2, lr=lr)\n"
    )
    monkeypatch.chdir(tmp_path)
    name = normalized_name("compressed-my_methods:my_fedavg")
    assert find(name)(lr=0.2, density=0.5).settings["lr"] == 0.2
    with pytest.raises(
        ValueError, match=r"unknown algorithm 'my-fedavg'.*package\.module:function$"
    ):
        find("my-fedavg")


def test_a_phase_is_needed_for_every_round():
    @method("nothing")
    def nothing():
        return Algorithm(lambda round: None)

    with pytest.raises(TypeError, match="phase must return a Phase for every round, got None in r"):
        nothing()


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
    blocks = guide.blocks()
    assert len([line for line in blocks[0].splitlines() if line]) <= 15
    modules = set(re.findall(r"^from (fedsift[\w.]*)", "".join(blocks), re.MULTILINE))
    assert modules == {"fedsift", "fedsift.algorithms"}


def test_the_guide_compresses_fedprox_in_three_lines():
    (block,) = (block for block in guide.blocks() if "compressed(fedprox(mu=0.1, l" in block[:120])
    assert "density=0.01, bits=4" in block
    assert len([line for line in block.splitlines() if line]) == 3


def test_a_custom_method_may_be_redefined():
    for _ in range(2):
        train(lambda context, update, memory: (parts_of(update), {}))


def colored() -> Algorithm:
    """Made with @method in the test below."""
    return algorithms.fedsgd()


def test_a_report_knows_the_color_under_both_names():
    assert style_of("colored", 5) == style_of(f"{__name__}:colored", 5) == (5, "longdash")
    method("colored", color=palette()[1], dashed=True)(colored)
    assert style_of("colored", 5) == style_of(f"{__name__}:colored", 5) == (1, "dash")


def test_a_schedule_must_not_change_what_is_remembered():
    @method("growing")
    def growing(number: int = 1, lr: float = 0.1) -> Algorithm:
        phase = algorithms.fedsgd(lr=lr).phase(1)
        return Algorithm(phase=always(phase), client_memory=("last",), lengths={"last": number})

    said = "^with number=2, the method would have another state, memory or weights than in round 1"
    with pytest.raises(ValueError, match=said):
        growing(number=lambda round: round).phase(2)
