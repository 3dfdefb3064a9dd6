# SPDX-License-Identifier: Apache-2.0
"""Requests of the shell at a root: "save soon".

    <root>/.manager/requests/<nonce>.json   ``RequestRecord``

Rank 0 of a running manager that watches for them takes each one once, and removes it.
"""

from __future__ import annotations

import msgspec

from actorsnap.errors import UsageError
from actorsnap.format.manifest import seal, unseal
from actorsnap.format.steps import MANAGER_FOLDER
from actorsnap.wording import printable

REQUESTS_FOLDER = f"{MANAGER_FOLDER}/requests"

MAX_REASON = 1000
"""Greatest length of a reason, of a request or a pin, in characters."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A save that a person or a script asked for.

    Attributes:
        created_s: In seconds since 1970, for people.
    """

    reason: str
    created_s: float
    host: str


def check_reason(reason: object, example: str) -> str:
    """Returns a reason that every message and record can hold.

    Args:
        example: A call with a reason.

    Raises:
        UsageError: It is not a text of one line, or has more than ``MAX_REASON`` characters.
    """
    if not isinstance(reason, str):
        raise UsageError(f"a reason is a text, not {type(reason).__name__}: write {example}")
    text = str.__str__(reason)  # msgspec takes no subclasses
    if len(text) > MAX_REASON:
        raise UsageError(
            f"the reason has {len(text)} characters; at most {MAX_REASON} are allowed: {example}"
        )
    if not text.strip() or len(text.splitlines()) > 1 or printable(text) != text:
        raise UsageError(f"a reason is one line of text, not {text!r}: write {example}")
    return text


def request_key(nonce: str) -> str:
    return f"{REQUESTS_FOLDER}/{nonce}.json"


def encode_request(record: RequestRecord) -> bytes:
    return seal(msgspec.json.encode(record))


def decode_request(data: bytes) -> RequestRecord | None:
    """Returns None for anything else: a damaged request asks for nothing."""
    body = unseal(data)
    if body is None:
        return None
    try:
        return msgspec.json.decode(body, type=RequestRecord)
    except (ValueError, RecursionError):
        return None
