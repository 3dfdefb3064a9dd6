"""How a backend reads its ``storage_options``: a frozen struct, and unknown names refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from actorsnap.errors import UsageError

__all__ = ["convert_options"]

S = TypeVar("S", bound=msgspec.Struct)


def convert_options(options: Mapping[str, Any], to: type[S], *, scheme: str) -> S:
    """``options`` as a ``to``. Its ``__post_init__`` may raise ``ValueError``.

    Raises:
        UsageError: a name is unknown, or a value not what it must be. No value is shown: it may
            be a secret.
    """
    names = to.__struct_fields__
    for name in options:
        if name not in names:
            meant = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"it has: {', '.join(names)}"
            raise UsageError(f"{scheme}:// has no storage option {name!r}; {hint}")
    try:
        return msgspec.convert(dict(options), to)
    except msgspec.ValidationError as error:
        raise UsageError(f"storage_options of {scheme}://: {error}") from None
