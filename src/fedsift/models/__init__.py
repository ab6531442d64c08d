"""Models by name.

- ``registry.py``: all models by name
- ``convnets.py``, ``resnet.py``, ``transformer.py``: the networks
- ``user_factory.py``: models from the user's own function
"""

from fedsift.models.registry import MODELS, build, default_model

__all__ = ["MODELS", "build", "default_model"]
