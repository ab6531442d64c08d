"""Settings are declared in a method's signature; everything else reads them from there."""

import json
from typing import Annotated

import pytest

from fedsift.algorithms import METHODS, Setting, describe, find, method, settings_of
from fedsift.algorithms.settings import SHARE


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
    for key in settings_of(name):
        for wrong in (float("nan"), float("inf"), -1.0, True, "1"):
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
