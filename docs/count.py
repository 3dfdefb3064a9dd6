# SPDX-License-Identifier: Apache-2.0
"""Counts the figures of docs/architecture.md: ``python -m docs.count [folder of a package]``."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_SAME_CALL = {"planning", "protocol", "actors", "runtime"}
"""A module name may recur in these packages, for the same call."""

_FACADES = {"snapshot.py", "sync.py", "manager", "interop"}
"""Their parameters, and those of the shell's commands, are the users' options: not counted."""


def count(root: Path) -> dict[str, int]:
    """Returns the figures of a package by name."""
    files = sorted(root.rglob("*.py"))
    found: Counter[str] = Counter(files=len(files))
    modules: dict[str, list[str]] = {}
    classes: Counter[str] = Counter()
    for file in files:
        source = file.read_text()
        tree = ast.parse(source)
        docstrings = _docstrings(tree)
        comments, code = _comments_and_code(source, docstrings)
        texts = [*docstrings.values(), *comments]
        found["lines"] += source.count("\n")
        found["lines of code"] += code
        found["words of docstrings and comments"] += sum(len(text.split()) for text in texts)
        package = file.relative_to(root).parts[0]
        if file.stem != "__init__":
            modules.setdefault(file.stem, []).append(package)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
                found["classes in protocol/"] += package == "protocol"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                number = len([arg for arg in given if arg.arg not in ("self", "cls")])
                is_facade = package in _FACADES or package.startswith("cli")
                if not is_facade:
                    found["most parameters"] = max(found["most parameters"], number)
    found["module names used twice"] = sum(
        len(packages) > 1
        and not (set(packages) <= _SAME_CALL and len(set(packages)) == len(packages))
        for packages in modules.values()
    )
    found["class names used twice"] = sum(number > 1 for number in classes.values())
    return dict(sorted(found.items()))


def _docstrings(tree: ast.AST) -> dict[int, str]:
    """Returns all strings that stand as statements, by their first line."""
    return {
        node.lineno: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _comments_and_code(source: str, docstrings: dict[int, str]) -> tuple[list[str], int]:
    comments: list[str] = []
    code: set[int] = set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("# "))
        elif token.type not in skipped and not is_docstring:
            code.update(range(token.start[0], token.end[0] + 1))
    return comments, len(code)


if __name__ == "__main__":
    for name, number in count(Path(sys.argv[1] if len(sys.argv) > 1 else "actorsnap")).items():
        print(f"{name:36} {number:>7,}")
