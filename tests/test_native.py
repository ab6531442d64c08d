"""The C kernels are compiled once, cached privately, and never loaded from another user's files."""

import os

import pytest

from fedsift import native
from fedsift.codec.native import LIBRARY


@pytest.fixture(autouse=True)
def _compile_quickly(monkeypatch):
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))


SOURCE = LIBRARY.source
needs_compiler = pytest.mark.skipif(LIBRARY.load() is None, reason="needs a C compiler")


@needs_compiler
def test_the_kernels_are_compiled_once(tmp_path, monkeypatch):
    path = native.built(tmp_path, SOURCE)
    monkeypatch.setattr(native, "compiled", None)
    assert native.built(tmp_path, SOURCE) == path
    assert list(tmp_path.iterdir()) == [path]


def test_each_compiler_has_its_own_file(monkeypatch):
    before = native.fingerprint(SOURCE)
    monkeypatch.setenv("CC", "another-compiler")
    assert native.fingerprint(SOURCE) != before


@needs_compiler
def test_a_file_that_others_could_have_written_is_replaced(tmp_path):
    path = native.built(tmp_path, SOURCE)
    kernels = path.read_bytes()
    path.write_bytes(b"planted")
    path.chmod(0o777)
    assert native.built(tmp_path, SOURCE).read_bytes() == kernels
    assert path.stat().st_mode & 0o777 == 0o700
    path.unlink()
    path.symlink_to("/dev/null")
    assert native.built(tmp_path, SOURCE).read_bytes() == kernels


@needs_compiler
def test_the_folder_of_the_kernels_is_private(tmp_path):
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert native.loaded_from(folder, SOURCE)
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_another_user_s_folder_is_not_used(tmp_path, monkeypatch):
    planted = tmp_path / f"kernels-{native.fingerprint(SOURCE)}.so"
    planted.write_bytes(b"planted")
    own = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: own + 1)
    assert not native.make_private(tmp_path)
    assert not native.is_private(planted)
    monkeypatch.undo()
    monkeypatch.setattr(native, "make_private", lambda folder: False)
    assert native.loaded_from(tmp_path, SOURCE)
    assert planted.read_bytes() == b"planted"


@pytest.mark.parametrize("compiler", ["false", "there-is-no-such-compiler"])
def test_a_compiler_that_fails_leaves_nothing_behind(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(OSError, match=compiler):
        native.built(tmp_path, SOURCE)
    assert list(tmp_path.iterdir()) == []
