# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of docs/protocol.md: the messages, and the machines' diagrams.

``make docs``. What stands between two marks ``<!-- begin x -->`` and ``<!-- end -->`` is
replaced, the rest is left. A test fails while the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import msgspec

from actorsnap.protocol import rounds
from actorsnap.protocol.messages import FromCoordinator, ToCoordinator
from actorsnap.protocol.rounds import Table

PAGE = Path(__file__).parent / "protocol.md"


def messages(union: Any) -> str:
    """One line per message: its tag, name, fields, and the first sentence about it."""
    lines = ["| tag | message | fields | |", "|---|---|---|---|"]
    for message in get_args(union):
        fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(message))
        said = inspect.cleandoc(message.__doc__).split("\n\n")[0].replace("\n", " ")
        said = said.replace("``", "`")
        tag = message.__struct_config__.tag
        lines.append(f"| `{tag}` | `{message.__name__}` | {fields} | {said} |")
    return "\n".join(lines)


class Machine:
    """A machine's table, with where each rule can lead.

    The table says which rule is for which event; the rule's source, and that of the methods
    that it calls, which states it sets.
    """

    def __init__(self, table: Table[Any, Any], machine: type, states: type[StrEnum]) -> None:
        self._table = table
        self._states = states
        self._sets: dict[str, set[str]] = {}
        self._calls: dict[str, set[str]] = {}
        for method in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(machine)))):
            if isinstance(method, ast.FunctionDef):
                self._read(method)

    def diagram(self) -> str:
        """Mermaid: every transition that leaves a state."""
        labels: dict[tuple[str, str], list[str]] = {}
        for state, row in self._table.items():
            for event, rule in row.items():
                for target in self._targets(rule) - {state}:
                    labels.setdefault((str(state), target), []).append(event.__name__)
        first, *_ = self._states
        last = [state for state in self._states if not self._table[state]]
        order = [str(state) for state in self._states]
        edges = sorted(labels, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))
        return "\n".join(
            [
                "```mermaid",
                "stateDiagram-v2",
                f"    [*] --> {first}",
                *(f"    {a} --> {b} : {', '.join(sorted(labels[a, b]))}" for a, b in edges),
                *(f"    {state} --> [*]" for state in last),
                "```",
            ]
        )

    def table(self) -> str:
        """One line per state: what it takes note of, and what it passes over."""
        lines = ["| state | takes | passes over |", "|---|---|---|"]
        for state in self._states:
            found: dict[bool, list[str]] = {True: [], False: []}
            for event, rule in self._table[state].items():
                found[rule.__name__ == "_ignore"].append(f"`{event.__name__}`")
            if self._table[state]:
                cells = [", ".join(sorted(found[is_ignored])) for is_ignored in (False, True)]
                lines.append(f"| {state} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _read(self, method: ast.FunctionDef) -> None:
        sets = self._sets.setdefault(method.name, set())
        calls = self._calls.setdefault(method.name, set())
        for node in ast.walk(method):
            if isinstance(node, ast.Assign):
                sets |= {str(self._states[name]) for name in _assigned(node)}
            elif isinstance(node, ast.Call):
                calls |= _of_self(node.func)

    def _targets(self, rule: Callable[..., Any]) -> set[str]:
        seen: set[str] = set()
        to_see = [rule.__name__]
        while to_see:
            name = to_see.pop()
            if name not in seen and name in self._calls:
                seen.add(name)
                to_see += self._calls[name]
        return {state for name in seen for state in self._sets[name]}


def _of_self(node: ast.expr) -> set[str]:
    """``{"x"}`` for ``self.x``, else nothing."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return {name}
    return set()


def _assigned(node: ast.Assign) -> list[str]:
    """The names of the states that an assignment sets ``self.state`` to."""
    names = []
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for left, right in pairs:
            if _of_self(left) == {"state"}:
                states = [right.body, right.orelse] if isinstance(right, ast.IfExp) else [right]
                names += [state.attr for state in states if isinstance(state, ast.Attribute)]
    return names


def parts() -> dict[str, str]:
    """Each generated part of the page, by its name."""
    coordinating = Machine(rounds._COORDINATOR, rounds.Coordinator, rounds.CoordinatorState)
    arriving = Machine(rounds._PARTICIPANT, rounds.Participant, rounds.ParticipantState)
    return {
        "messages to the coordinator": messages(ToCoordinator),
        "messages to a rank": messages(FromCoordinator),
        "rounds coordinator diagram": coordinating.diagram(),
        "rounds coordinator table": coordinating.table(),
        "rounds rank diagram": arriving.diagram(),
        "rounds rank table": arriving.table(),
    }


def render(page: str) -> str:
    """The page with its generated parts as they should be.

    Raises:
        LookupError: the page lacks a part, or has one that is not known.
    """
    return fill(page, parts())


def fill(page: str, wanted: dict[str, str]) -> str:
    """The page with each part replaced by that of its name.

    Raises:
        LookupError: the page lacks a part, or has one that is not wanted.
    """
    pattern = re.compile(r"<!-- begin (?P<name>.*?) -->\n.*?<!-- end -->", re.DOTALL)
    if {match["name"] for match in pattern.finditer(page)} != wanted.keys():
        raise LookupError(f"the page's parts are not {sorted(wanted)}")

    def replace(match: re.Match[str]) -> str:
        return f"<!-- begin {match['name']} -->\n{wanted[match['name']]}\n<!-- end -->"

    return pattern.sub(replace, page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
