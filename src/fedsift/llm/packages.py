"""The packages for language models, which are imported only when they are used."""

from __future__ import annotations

from importlib.util import find_spec

from fedsift.errors import ConfigError


def require(*packages: str) -> None:
    """Raise ConfigError unless all packages are installed.

    >>> require("no_such_package")
    Traceback (most recent call last):
    ...
    fedsift.errors.ConfigError: language models need no_such_package: pip install 'fedsift[llm]'
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"language models need {' and '.join(missing)}: pip install 'fedsift[llm]'"
        )
