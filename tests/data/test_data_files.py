"""Data sets are downloaded from their official sources and verified."""

import gzip
import hashlib
import io
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from fedsift.cli import main
from fedsift.data import DATASETS
from fedsift.data.download import fetch, file_state
from fedsift.data.official_sources import SOURCES, Download, File, Source

CONTENT = bytes(range(256)) * 1200


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Handler(SimpleHTTPRequestHandler):
    """Serves files and ranges of files, and can close the connection early."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if self.server.ranges and (wanted := self.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + self.server.breaks_after])

    def log_message(self, *words):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIFT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("fedsift.data.folder.DEBIAN", tmp_path / "debian")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as made:
        made.files, made.asked, made.ranges, made.breaks_after = {}, [], True, 10**9
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def offer(server, monkeypatch, name, files):
    """Make this server the source of a data set, with these files instead of the real ones."""
    server.files = {f"/{path}": content for path, content in files.items()}
    home = f"http://127.0.0.1:{server.server_port}"
    downloads = [
        Download(
            f"{home}/{path}",
            len(content),
            sha256(content),
            (File(f"{name}/{path}", sha256(unpacked(content))),),
        )
        for path, content in files.items()
    ]
    monkeypatch.setitem(SOURCES, name, Source(f"{home}/about", tuple(downloads)))


def unpacked(content):
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def test_get_downloads_all_files_and_check_accepts_them(server, monkeypatch, tmp_path, capsys):
    packed = gzip.compress(CONTENT)
    offer(server, monkeypatch, "fashion-mnist", {"a.gz": packed, "b.gz": gzip.compress(b"b")})
    assert main(["data", "check", "fashion-mnist"]) == 1
    assert main(["data", "get", "fashion-mnist"]) == 0
    assert (tmp_path / "data" / "fashion-mnist" / "a.gz").read_bytes() == packed
    capsys.readouterr()
    assert main(["data", "check", "fashion-mnist"]) == 0
    assert capsys.readouterr().out.count("ok  ") == 2
    assert sorted(p.name for p in (tmp_path / "data").rglob("*") if p.is_file()) == ["a.gz", "b.gz"]


def test_get_downloads_only_missing_and_damaged_files(server, monkeypatch, tmp_path):
    offer(server, monkeypatch, "svhn", {"a.mat": CONTENT, "b.mat": b"b", "c.mat": b"c"})
    folder = tmp_path / "data" / "svhn"
    folder.mkdir(parents=True)
    (folder / "a.mat").write_bytes(CONTENT)
    (folder / "b.mat").write_bytes(b"something else")
    assert main(["data", "get", "svhn"]) == 0
    assert [path for path, _ in server.asked] == ["/b.mat", "/c.mat"]
    assert (folder / "b.mat").read_bytes() == b"b"


def test_an_interrupted_download_resumes(server, monkeypatch, tmp_path, capsys):
    offer(server, monkeypatch, "svhn", {"a.mat": CONTENT})
    server.breaks_after = 100_000
    target = tmp_path / "data" / "svhn" / "a.mat"
    assert main(["data", "get", "svhn"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the connection was lost after 100000 of {len(CONTENT)} bytes" in said
    assert not target.exists()
    server.breaks_after = 10**9
    assert main(["data", "get", "svhn", "--data-dir", str(tmp_path / "data")]) == 0
    assert server.asked == [("/a.mat", None), ("/a.mat", "bytes=100000-")]
    assert target.read_bytes() == CONTENT


def test_a_server_without_ranges_sends_the_whole_file_again(server, monkeypatch, tmp_path):
    offer(server, monkeypatch, "svhn", {"a.mat": CONTENT})
    server.ranges = False
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.mat.partial").write_bytes(b"x" * 1000)
    assert main(["data", "get", "svhn"]) == 0
    assert (tmp_path / "data" / "svhn" / "a.mat").read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"x", CONTENT + b"more"], ids=["other", "longer"])
def test_a_file_with_another_digest_is_never_put_in_place(
    wrong, server, monkeypatch, tmp_path, capsys
):
    offer(server, monkeypatch, "svhn", {"a.mat": CONTENT})
    server.files["/a.mat"] = wrong
    assert main(["data", "get", "svhn"]) == 1
    assert "not the official one" in capsys.readouterr().err
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]


def test_a_download_stops_if_the_server_sends_too_much(server, monkeypatch, tmp_path):
    offer(server, monkeypatch, "svhn", {"a.mat": b"short"})
    server.files["/a.mat"] = bytes(50_000_000)
    download = SOURCES["svhn"].downloads[0]
    with pytest.raises(ValueError, match="not the official one"):
        assert max(fetch(download, tmp_path)) < 1_000_000


@pytest.mark.parametrize("name", SOURCES)
def test_without_network_the_error_says_which_files_to_put_where(
    name, tmp_path, monkeypatch, capsys
):
    def no_network(*words, **named):
        raise OSError("Network is unreachable")

    monkeypatch.setattr("fedsift.data.download.urlopen", no_network)
    monkeypatch.setattr("fedsift.data.folder.DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("FEDSIFT_DATA", "elsewhere")
    assert main(["data", "get", name, "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "Network is unreachable; to continue the download, run the same command" in said
    assert f"into {tmp_path}: " in said
    assert SOURCES[name].page in said
    for file in SOURCES[name].files:
        assert file.path in said


def tar_of(members):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return made.getvalue()


def test_only_the_listed_files_are_extracted_from_an_archive(server, monkeypatch, tmp_path):
    wanted = {f"cifar-10-batches-bin/{n}.bin": n.encode() for n in ("data_batch_1", "test_batch")}
    packed = tar_of({**wanted, "../evil": b"evil", "/tmp/fedsift-evil": b"", "readme.html": b""})
    server.files = {"/c.tar.gz": packed}
    files = tuple(File(path, sha256(content)) for path, content in wanted.items())
    url = f"http://127.0.0.1:{server.server_port}/c.tar.gz"
    source = Source("about", (Download(url, len(packed), sha256(packed), files),))
    monkeypatch.setitem(SOURCES, "cifar-10", source)
    assert main(["data", "get", "cifar-10"]) == 0
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {f"data/{path}" for path in wanted}
    assert {file_state(file) for file in files} == {"ok"}


def test_check_finds_a_damaged_file(server, monkeypatch, tmp_path, capsys):
    offer(server, monkeypatch, "fashion-mnist", {"a.gz": gzip.compress(CONTENT), "b.gz": b""})
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    for spoiled in (gzip.compress(CONTENT + b"x"), gzip.compress(CONTENT)[:-9], b"<html>"):
        (folder / "a.gz").write_bytes(spoiled)
        assert main(["data", "check", "fashion-mnist"]) == 1
        assert f"damaged   {folder / 'a.gz'}" in capsys.readouterr().out


def test_the_same_data_compressed_differently_is_accepted(server, monkeypatch, tmp_path):
    offer(server, monkeypatch, "fashion-mnist", {"a.gz": gzip.compress(CONTENT)})
    (tmp_path / "debian" / "fashion-mnist").mkdir(parents=True)
    (tmp_path / "debian" / "fashion-mnist" / "a.gz").write_bytes(gzip.compress(CONTENT, 1))
    assert main(["data", "check", "fashion-mnist"]) == 0


def test_list_shows_every_data_set_and_its_folder(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedsift.cli.data.out", Console(width=400))  # no path is folded
    offer(server, monkeypatch, "svhn", {"a.mat": CONTENT})
    assert main(["data", "get", "svhn"]) == 0
    capsys.readouterr()
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in DATASETS:
        assert any(name in line for line in lines)
    assert any("svhn" in line and str(tmp_path / "data" / "svhn") in line for line in lines)
    assert any("cifar-10" in line and "6 of 6 files are missing" in line for line in lines)


@pytest.mark.parametrize("command", ["get", "check"])
def test_digits_need_no_download(command, capsys):
    assert main(["data", command, "digits"]) == 0
    assert "scikit-learn" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["get", "check"])
def test_an_unknown_data_set_gives_a_one_line_error(command, capsys):
    assert main(["data", command, "mnist"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in DATASETS)
    assert said.count("\n") == 1


def test_a_text_by_author_has_no_download(tmp_path, capsys):
    assert main(["data", "get", "sotu", "--data-dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedsift: sotu has no official download: put its files into")
