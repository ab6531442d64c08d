"""``python -m fedsift`` is the command ``fedsift``."""

from fedsift.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
