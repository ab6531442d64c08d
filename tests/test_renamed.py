"""Names that earlier documentation used tell in one line what they are called now."""

import importlib

import pytest

from fedsift.errors import RENAMED


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_gives_the_new_name(old):
    module, name = old.rsplit(".", 1)
    with pytest.raises(ImportError, match=f"^{old} is now {RENAMED[old]}$"):
        exec(f"from {module} import {name}")


def test_importing_a_renamed_module_gives_the_new_name():
    with pytest.raises(ModuleNotFoundError, match=r"^fedsift.mask is now fedsift.selection$"):
        importlib.import_module("fedsift.mask")


@pytest.mark.parametrize("new", RENAMED.values())
def test_every_new_name_exists(new):
    module, name = new.rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name) or importlib.import_module(new)


def test_other_names_are_still_missing():
    data = importlib.import_module("fedsift.data")
    assert not hasattr(data, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from fedsift.data import nothing")
