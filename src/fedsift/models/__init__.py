"""Models by name."""

from fedsift.models.registry import MODELS, build, default_model

__all__ = ["MODELS", "build", "default_model"]
