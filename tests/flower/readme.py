"""README's diff, and an app in the form of Flower's PyTorch quickstart to apply it to."""

import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"


def copy_app(folder):
    """Copy the app, which knows nothing of fedsift, and return its folder."""
    return Path(shutil.copytree(HERE / "quickstart", folder / "app"))


def apply_readme(app):
    """Apply the diff in README's section about Flower."""
    _, _, section = README.read_text(encoding="utf-8").partition("\n## Run on Flower\n")
    found = re.search(r"^```diff\n(.*?)^```", section.partition("\n## ")[0], re.M | re.S)
    subprocess.run(
        ["git", "apply", "--verbose", "-"],
        input=found[1], text=True, check=True, cwd=app / "pytorchapp",
    )  # fmt: skip
