"""Names and encodes claims, which keep copies and garbage collectors apart.

A copy writes under the name of the attempt that it copies, which alone would be garbage. So the
copy makes its own attempt at the destination, and claims the copied one in that attempt's folder.
Implements "Claims" of ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = [
    "claim_prefix",
    "collection_key",
    "copy_claim_key",
    "decode_copy_claim",
    "encode_copy_claim",
    "parse_claim",
]

_COLLECT = "collect"
_COPY = "copy/"


class _CopyClaim(msgspec.Struct):
    stored: list[str]


def claim_prefix(owner: str) -> str:
    return f"{owner}/claim/"


def copy_claim_key(owner: str, attempt: str) -> str:
    """Returns the key with which the copy ``owner`` claims the attempt that it copies."""
    return f"{claim_prefix(owner)}{_COPY}{attempt}"


def collection_key(owner: str) -> str:
    """Returns the key with which ``owner`` announces that it deletes leftovers of copies."""
    return f"{claim_prefix(owner)}{_COLLECT}"


def parse_claim(owner: str, key: str) -> str | None:
    """Returns the attempt that a claim names; ``""`` for a collection, None for other keys."""
    rest = key.removeprefix(claim_prefix(owner))
    if rest == _COLLECT:
        return ""
    attempt = rest.removeprefix(_COPY)
    is_claim = rest.startswith(_COPY) and not attempt.startswith(".") and "/" not in attempt
    return attempt if is_claim and attempt else None


def encode_copy_claim(stored: Iterable[str]) -> bytes:
    """Encodes the claim of a copy; ``stored`` has the keys of complete objects."""
    return msgspec.json.encode(_CopyClaim(sorted(stored)))


def decode_copy_claim(data: bytes) -> list[str]:
    """Returns the keys of complete objects; empty if the claim is unreadable."""
    try:
        return msgspec.json.decode(data, type=_CopyClaim).stored
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
