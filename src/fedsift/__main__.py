"""``python -m fedsift`` is the command ``fedsift``."""

from fedsift.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
