"""The table of sift_common's traffic in the documentation is the one of the committed runs."""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "reproduce" / "sift"))
from common import SECURE, TABLE, lines
from page import PAGE, table


def test_the_page_has_the_committed_table():
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert table(lines(rows)) in PAGE.read_text(encoding="utf-8")
    secure = {(row["setting"], row["seed"]) for row in rows if row["method"] == SECURE}
    assert secure >= {(setting, seed) for setting in ("iid", "noniid") for seed in "012"}
