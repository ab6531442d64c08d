"""The table of sift_common's traffic in the documentation is the one of the committed runs."""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "reproduce" / "sift"))
from common import TABLE, lines
from page import PAGE, markdown

NUMBERS = ("round_to_target", "up", "down", "secure_up", "last_accuracy")


def test_the_page_has_the_committed_table():
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    read = [row | {key: float(row[key]) if row[key] else None for key in NUMBERS} for row in rows]
    assert markdown(lines(read)) in PAGE.read_text(encoding="utf-8")
    assert {(row["setting"], row["seed"]) for row in rows} == {
        (setting, seed) for setting in ("iid", "noniid") for seed in "012"
    }
