"""The scripts that write the tables, on a small task."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from fedsift.algorithms import fedadam_ssm

SCRIPTS = Path(__file__).parents[2] / "reproduce" / "theory"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    tasks, masks, reality = map(import_module, ("tasks", "masks", "reality"))
    for table in (tasks.TASKS, tasks.COMPARED):
        small = tasks.task("digits", "iid", 3, batch_size=8, samples=60)
        monkeypatch.setitem(table, "digits-iid", lambda small=small: small)
    for script in (masks, reality):
        monkeypatch.setattr(
            script, "fedadam_ssm", lambda **settings: fedadam_ssm(local_steps=2, **settings)
        )
        monkeypatch.setattr(script, "LARGE", 1000)
    monkeypatch.setattr(masks, "ROUNDS", (1, 2))
    monkeypatch.setattr(masks, "MAX_CLIENTS", 2)
    monkeypatch.setattr(reality, "ROUNDS", 2)
    return import_module("tables"), masks, reality


def test_a_run_replaces_only_the_rows_of_its_task(scripts, monkeypatch, tmp_path):
    tables, masks, reality = scripts
    monkeypatch.setattr(sys, "argv", ["x", "--tasks", "digits-iid", "--out", str(tmp_path)])
    for script in (reality, masks):
        script.main()
    for name, rows in (("constants.csv", 5), ("reality.csv", 2 * 3), ("masks.csv", 2 * 3 * 3)):
        before, after = tables.read(SCRIPTS / name), tables.read(tmp_path / name)
        mine = [row for row in after if row["task"] == "digits-iid"]
        assert len(mine) == rows
        assert {row["images"] for row in mine} == {"60"}
        others = [row for row in before if row["task"] != "digits-iid"]
        assert [row["task"] for row in after if row not in mine] == [r["task"] for r in others]
    assert all(1 <= float(row["best"]) <= 1.00011 for row in mine)
    assert all(float(row[m]) >= float(row["best"]) for row in mine for m in ("W", "M", "V"))
    assert {row["clients"] for row in mine} == {"2"}


def test_an_unknown_task_is_refused_in_one_line(scripts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--tasks", "mnist"])
    with pytest.raises(SystemExit):
        scripts[1].main()
    assert "there is no task mnist; choose from digits-iid" in capsys.readouterr().err
