"""Small finished runs, and what their reports contain."""

import json
import re

from fedsift.runs import RunConfig, RunFolder, federation_of, restore_run, run_summary, train_rounds

METHODS = ("fedadam-ssm", "fedadam-top", "fedadam", "efficient-adam")
SEEDS = (0, 1)
ROUNDS = 5


def trained(path, **values):
    """The folder of a small finished run."""
    config = RunConfig.from_values({"clients": 4, "rounds": ROUNDS, **values})
    folder, federation = RunFolder.create(path, config), federation_of(config)
    history = list(train_rounds(folder, federation, restore_run(folder, federation), config.rounds))
    folder.write_summary(run_summary(config, federation, history))
    return path


def data_in(page):
    """The data of a report's script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    return json.loads(found[1])
