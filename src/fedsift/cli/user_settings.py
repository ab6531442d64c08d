"""Options for the settings of the user's own methods, given as ``package.module:method``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from typer.core import TyperCommand, TyperOption

from fedsift.cli.exit_codes import user_input
from fedsift.cli.options import METHOD_PANEL, SETTING_TYPES, default_text, setting_help
from fedsift.errors import ConfigError


class RunCommand(TyperCommand):
    """A command that trains. The settings of the user's own methods are options, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the options of the user's methods among the arguments, then read them all."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        given, _, _ = parser.parse_args(list(args))
        known = {param.name for param in self.params}
        self.params = [*self.params, *user_options(names_in(given), known)]
        return super().parse_args(ctx, args)


def names_in(given: Mapping[str, Any]) -> list[str]:
    """Return the names of the user's own methods, on the command line or in its config file.

    >>> names_in({"algorithms": "fedadam,my_module:fedprox"})
    ['my_module:fedprox']
    """
    named = given.get("algorithms") or given.get("algorithm") or names_in_file(given.get("config"))
    names = named.split(",") if isinstance(named, str) else named
    if not isinstance(names, list):
        return []  # the command refuses it
    return [name.strip() for name in names if isinstance(name, str) and ":" in name]


def names_in_file(file: str | None) -> Any:
    """Return the methods that a config file names; none if the command will refuse the file."""
    if file is None:
        return []
    from fedsift.runs.config import read_values

    try:
        values = read_values(Path(file))
    except ConfigError:
        return []
    return values.get("algorithms") or values.get("algorithm") or []


def user_options(names: Iterable[str], known: Container[str | None]) -> Iterator[TyperOption]:
    """Yield an option for each setting of these methods that is not one of the known options."""
    uses: dict[str, dict[str, dict[str, Any]]] = {}
    for name in names:
        for setting in described_settings(name):
            if setting["name"] not in known:
                uses.setdefault(setting["name"], {})[name] = setting
    for key, by_method in uses.items():
        kind = next(iter(by_method.values()))["type"]
        yield TyperOption(
            param_decls=[key, f"--{key.replace('_', '-')}"],
            type=SETTING_TYPES.get(kind, SETTING_TYPES["float"]),
            help=setting_help(by_method),
            show_default=default_text({name: x["default"] for name, x in by_method.items()}),
            rich_help_panel=METHOD_PANEL,
        )


def described_settings(name: str) -> list[dict[str, Any]]:
    """Import a method and describe its settings."""
    from fedsift.algorithms import find

    with user_input():
        return [setting.describe() for setting in find(name).settings.values()]
