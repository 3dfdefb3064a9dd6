"""What tests of snapshots in object storage share: states, refusals, a look at what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from actorsnap import ActorSnapError, StateDict
from tests.servers.base import S3Server

__all__ = ["LARGE", "assert_no_secret", "keys_of", "refused", "state", "uploads_of"]

LARGE = 5 << 20
"""Floats of an object of two parts."""


def state(number: int, *, num_floats: int = LARGE) -> dict[str, StateDict]:
    """A state in which every four bytes differ from their neighbours, and from other states'."""
    weight = torch.arange(num_floats, dtype=torch.int32) + (number << 24)
    return {"model": StateDict(weight=weight.view(torch.float32)), "at": StateDict(step=number)}


def is_state(found: dict[str, StateDict], number: int, *, num_floats: int = LARGE) -> bool:
    expected = state(number, num_floats=num_floats)["model"]["weight"].view(torch.int32)
    weight = found["model"]["weight"].view(torch.int32)
    return found["at"]["step"] == number and torch.equal(weight, expected)


def assert_no_secret(text: str) -> None:
    for secret in (S3Server.secret_key, "secret-reader", "a-session-token", "Signature="):
        assert secret not in text, text


@contextmanager
def refused(
    match: str | None, kind: type[ActorSnapError] = ActorSnapError
) -> Iterator[pytest.ExceptionInfo[ActorSnapError]]:
    """``pytest.raises``, for errors that neither say nor carry a credential."""
    with pytest.raises(kind, match=match) as raised:
        yield raised
    error: BaseException | None = raised.value
    while error is not None:
        assert_no_secret(f"{error} {error!r} {getattr(error, 'fields', '')}")
        error = error.__cause__ or error.__context__


def keys_of(server: S3Server, bucket: str) -> list[str]:
    """All keys of a bucket, as another client sees them."""
    client = server.client()
    found = client.list_objects_v2(Bucket=bucket)
    client.close()
    assert not found["IsTruncated"]
    return [item["Key"] for item in found.get("Contents", ())]


def uploads_of(server: S3Server, bucket: str) -> list[str]:
    """The keys of all unfinished uploads of a bucket."""
    client = server.client()
    found: dict[str, Any] = client.list_multipart_uploads(Bucket=bucket)
    client.close()
    return [upload["Key"] for upload in found.get("Uploads", ())]
