# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of the reference: options, environment variables, policies, the shell.

``make docs``. A test fails while a page is out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from typer.main import get_command

from actorsnap.cli import app
from actorsnap.cli_app import COMMANDS
from actorsnap.manager import every, keep, notices
from actorsnap.options import Options
from docs.generate_protocol import fill

FOLDER = Path(__file__).parent / "reference"


def descriptions(kind: type) -> dict[str, str]:
    """What a class's docstring says of each attribute."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
    found = {}
    for name, description in re.findall(
        r"^    (\w+): (.*?)(?=^    \w|\Z)", text, flags=re.MULTILINE | re.DOTALL
    ):
        found[name] = " ".join(description.split()).replace("``", "`")
    return found


def options() -> str:
    """One line per field of ``Options``."""
    said = descriptions(Options)
    lines = ["| option | default | |", "|---|---|---|"]
    for field in msgspec.structs.fields(Options):
        value = field.default
        default = f"{value >> 20} << 20" if _is_mebibytes(value) else repr(value)
        lines.append(f"| `{field.name}` | `{default}` | {said[field.name]} |")
    return "\n".join(lines)


def _is_mebibytes(value: Any) -> bool:
    return isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0


def variables() -> str:
    """The variable of each option that has one, with the first sentence about the option."""
    said = descriptions(Options)
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(Options):
        if field.name != "allowed_types":
            default = "unset" if field.default is None else str(field.default)
            default = default.lower() if isinstance(field.default, bool) else default
            meaning = said[field.name].partition(". ")[0].removesuffix(".")
            lines.append(f"| `ACTORSNAP_{field.name.upper()}` | {default} | {meaning}. |")
    return "\n".join(lines)


def calls(holder: type) -> str:
    """A section per public name of a class that only holds other classes and functions."""
    parts = []
    for name in [name for name in vars(holder) if not name.startswith("_")]:
        made = getattr(holder, name)
        text, _, arguments = inspect.cleandoc(made.__doc__ or "").partition("\nArgs:\n")
        lines = [f"### `{holder.__name__}.{name}({_parameters(made)})`", "", text.strip()]
        if arguments:
            lines += ["", *_list_of(arguments.partition("\n\n")[0])]
        parts.append("\n".join(lines).replace("``", "`"))
    return "\n\n".join(parts)


def _parameters(made: Any) -> str:
    """The parameters of a call, with their defaults and without their types."""
    found: list[str] = []
    has_star = False
    for each in inspect.signature(made).parameters.values():
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            found.append("*")
        has_star |= each.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        star = "*" if each.kind is inspect.Parameter.VAR_POSITIONAL else ""
        default = "" if each.default is inspect.Parameter.empty else f"={each.default!r}"
        found.append(f"{star}{each.name}{default}")
    return ", ".join(found)


def _list_of(arguments: str) -> list[str]:
    found = re.findall(
        r"^    ([*\w]+): (.*?)(?=^    [*\w]|\Z)", arguments, re.MULTILINE | re.DOTALL
    )
    return [f"- `{name}`: {' '.join(text.split())}" for name, text in found]


def commands() -> str:
    """A section per command: what it does, its arguments and options."""
    parts = []
    found: Mapping[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name in COMMANDS:
        command = found[name]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join(["actorsnap", name, *map(_usage, arguments), "[OPTIONS]"])
        lines = [f"## {name}", "", _cell(command.help), "", f"```text\n{usage}\n```", ""]
        lines += ["| | |", "|---|---|"]
        for each in command.params:
            if each.name != "help":
                lines.append(f"| {_names(each)} | {_cell(each.help or '')}{_default(each)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _usage(argument: Any) -> str:
    name: str = (argument.metavar or argument.name).upper().strip("[]").removesuffix("...")
    return name + ("..." if argument.nargs == -1 else "")


def _names(each: Any) -> str:
    if each.param_type_name == "argument":
        return f"`{_usage(each)}`"
    value = "" if each.is_flag or each.count else f" {each.metavar or 'VALUE'}"
    return ", ".join(f"`{name}{value}`" for name in each.opts)


def _default(each: Any) -> str:
    if each.param_type_name == "option" and each.required:
        return " Required."
    if each.param_type_name == "argument" or each.is_flag or each.default in (None, "", []):
        return ""
    return f" Default: {each.default}."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def pages() -> dict[Path, str]:
    """The text of each page, by its path, as it should be."""
    wanted = {
        "options.md": {"options": options()},
        "environment.md": {"variables": variables()},
        "cli.md": {"commands": commands()},
        "manager.md": {each.__name__: calls(each) for each in (every, keep, notices)},
    }
    return {
        FOLDER / name: fill((FOLDER / name).read_text(), parts) for name, parts in wanted.items()
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
