"""The progress of training: a bar in a terminal or notebook, one plain line per round elsewhere.

- ``text.py``: sizes, shares and times as text, and the line of a round
- ``display.py``: the displays, and which of them is used
- ``notices.py``: messages of the training itself
- ``outcome.py``: a warning for a run that has learned nothing
"""

from fedsift.progress.display import Show, round_progress
from fedsift.progress.outcome import training_warning
from fedsift.progress.text import file_size, percent, round_line, short_status, times_fewer

__all__ = [
    "Show",
    "file_size",
    "percent",
    "round_line",
    "round_progress",
    "short_status",
    "times_fewer",
    "training_warning",
]
