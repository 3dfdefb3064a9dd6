"""Reads ``storage_options`` into the struct of a backend.

Decides how options that a backend does not have, or of another type, are refused. Must not know
what they mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from actorsnap.errors import UsageError

__all__ = ["read_options"]

S = TypeVar("S", bound=msgspec.Struct)


def read_options(kind: type[S], options: Mapping[str, Any], backend: str) -> S:
    """The options as a ``kind``.

    Args:
        kind: Has a default for each field.
        options: From the caller.
        backend: For the message, ``s3`` say.

    Raises:
        UsageError: a name is unknown, or a value not of the type. The values are not told.
    """
    known = kind.__struct_fields__
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise UsageError(
                f"{backend}:// has no storage option {str(name)!r}; {guess}"
                f"there are: {', '.join(sorted(known))}"
            )
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"a storage option of {backend}:// is wrong: {error}") from None
