"""A run on disk: its configuration, metrics and checkpoint, and how it goes on after a crash."""

from fedsift.runs.config import RunConfig
from fedsift.runs.folder import RunFolder
from fedsift.runs.run import begin, federation_of, go, summarize

__all__ = ["RunConfig", "RunFolder", "begin", "federation_of", "go", "summarize"]
