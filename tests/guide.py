"""The methods that docs/how-to/own-method.md defines, as its readers get them."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "own-method.md"
NAMES = (
    "my_fedprox", "fedsgd_feedback", "fedavgm", "fedavg_own_momentum", "majority_vote",
    "ternary_fedavg", "fednova", "zeroth_order",
)  # fmt: skip


def blocks() -> list[str]:
    """The page's Python."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def methods() -> dict[str, Any]:
    """The methods by the names of their functions. They are registered."""
    found: dict[str, Any] = {}
    for block in blocks():
        if "@method(" in block:
            exec(block, found)
    return {name: found[name] for name in NAMES}
