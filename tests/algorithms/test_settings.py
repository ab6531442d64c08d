"""Settings are declared in a method's signature; everything else reads them from there."""

import json
from typing import Annotated, Literal

import pytest

from fedsift.algorithms import METHODS, Setting, describe, find, method, settings_of
from fedsift.algorithms.settings import COUNT, SHARE, written
from fedsift.runs.config import RunConfig


@pytest.fixture(autouse=True)
def _restore_registry():
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.parametrize("name", METHODS)
def test_every_built_in_method_is_described_in_full(name):
    (described,) = (each for each in describe() if each["name"] == name)
    assert json.loads(json.dumps(described)) == described
    assert described["summary"]
    assert described["color"]
    assert {s["name"]: s["default"] for s in described["settings"]} == settings_of(name)
    for setting in described["settings"]:
        assert setting["help"], setting["name"]
        assert not setting["help"].endswith("."), setting["name"]


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_built_in_method_is_checked(name):
    for key, default in settings_of(name).items():
        for wrong in (float("nan"), float("inf"), -1.0, 2 if type(default) is bool else True, "1"):
            with pytest.raises(ValueError, match=rf"{key} must be .*, got {wrong!r}"):
                find(name)(**{key: wrong})


def test_no_two_built_in_methods_look_alike():
    looks = [(each["color"], each["dashed"]) for each in describe()]
    assert len(set(looks)) == len(looks)


def test_a_method_declares_its_own_setting():
    refresh = Annotated[float, Setting("Share of coordinates redrawn each round", SHARE)]

    @method("redrawn", label="Redrawn", color="#8a2be2")
    def redrawn(refresh: refresh = 1, plain: float = 0.5, rounds=3):
        return METHODS["fedsgd"]()

    assert redrawn().settings == {"refresh": 1.0, "plain": 0.5, "rounds": 3}
    with pytest.raises(ValueError, match=r"refresh must be in \(0, 1\], got 2"):
        redrawn(refresh=2)
    with pytest.raises(ValueError, match="plain must be a finite number, got nan"):
        redrawn(plain=float("nan"))
    assert METHODS["redrawn"].describe()["settings"] == [
        {
            "name": "refresh",
            "type": "float",
            "default": 1,
            "range": "in (0, 1]",
            "help": "Share of coordinates redrawn each round",
        },
        {
            "name": "plain",
            "type": "float",
            "default": 0.5,
            "range": "a finite number",
            "help": "",
        },
        {"name": "rounds", "type": "int", "default": 3, "range": "a finite number", "help": ""},
    ]


Epochs = Annotated[int, Setting("Passes over the local data", COUNT)]
Server = Annotated[Literal["adam", "yogi"], Setting("The server's optimizer")]


def choosy():
    @method("choosy")
    def made(
        server: Server = "yogi",
        nesterov: bool = True,
        epochs: Epochs | None = None,
        label="plain",
    ):
        return METHODS["fedsgd"]()

    return made


def test_settings_may_be_names_booleans_or_left_out():
    made = choosy()
    assert repr(made()) == "choosy(server='yogi', nesterov=True, epochs=None, label='plain')"
    given = {"server": "adam", "nesterov": False, "epochs": 3, "label": "other"}
    assert made(**given).settings == given
    described = {s["name"]: s for s in METHODS["choosy"].describe()["settings"]}
    assert [s["type"] for s in described.values()] == ["str", "bool", "int", "str"]
    assert described["server"]["range"] == "one of: adam, yogi"
    assert described["epochs"]["default"] is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"server": "sgd"}, "server must be one of: adam, yogi, got 'sgd'"),
        ({"server": None}, "server must be one of: adam, yogi, got None"),
        ({"server": lambda round: "adam"}, "server must be one of: adam, yogi in all rounds"),
        ({"nesterov": 1}, "nesterov must be true or false, got 1"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": "none"}, "epochs must be a whole number of at least 1, got 'none'"),
        ({"label": 3}, "label must be text, got 3"),
    ],
)
def test_names_and_booleans_are_checked(given, said):
    with pytest.raises(ValueError, match=said):
        choosy()(**given)


def test_all_kinds_of_settings_are_read_from_their_text():
    made = choosy()
    given = {"server": "adam", "nesterov": False, "epochs": None, "label": "cosine(1)"}
    config = RunConfig.from_values({"algorithm": "choosy", **given, "epochs": "none"})
    assert config.make_algorithm().settings == given
    found = {key: config.flat()[key] for key in given}
    assert found == {key: written(x) for key, x in given.items()} == {**given, "epochs": "none"}
    assert RunConfig.from_values({**config.flat(), "epochs": "constant(2)"}).make_algorithm()
    assert made(epochs=lambda round: round).settings["epochs"](3) == 3


def test_a_setting_without_a_default_must_be_given():
    @method("strict")
    def strict(mu: float):
        return METHODS["fedsgd"]()

    with pytest.raises(ValueError, match="strict needs the setting 'mu'"):
        RunConfig.from_values({"algorithm": "strict"})
    assert RunConfig.from_values({"algorithm": "strict", "mu": 0.5}).flat()["mu"] == 0.5


def test_an_unknown_setting_is_refused_with_the_names_of_all():
    with pytest.raises(TypeError, match=r"fedadam: .*'rate'; its settings are local_steps, lr, "):
        METHODS["fedadam"](rate=0.1)
