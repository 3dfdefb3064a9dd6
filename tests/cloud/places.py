# SPDX-License-Identifier: Apache-2.0
"""What tests of snapshots in object storage share: states, refusals, a look at what is left."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch

from actorsnap import ActorSnapError, StateDict
from tests.servers.base import GcsServer, S3Server

__all__ = [
    "LARGE",
    "Requests",
    "Store",
    "assert_no_secret",
    "keys_of",
    "refused",
    "requests_of",
    "state",
    "uploads_of",
]

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


class Requests(NamedTuple):
    """What a proxy has to harm: methods, and patterns of what is asked for.

    Attributes:
        create: What comes first of the large object.
        part: The upload of a part of it, which is not the first one.
        complete: What makes an object of its parts.
        commit: The upload of the commit object.
        data: Reads from the large object.
        num_before: So many come before that of the first part.
    """

    create: dict[str, str]
    part: dict[str, str]
    complete: dict[str, str]
    commit: dict[str, str]
    data: dict[str, str]
    num_before: int


Store: TypeAlias = S3Server | GcsServer

_REQUESTS = {
    "s3": Requests(
        create={"method": "POST", "pattern": "uploads"},
        part={"method": "PUT", "pattern": "partNumber=2&"},
        complete={"method": "POST", "pattern": "uploadId="},
        commit={"method": "PUT", "pattern": r"/run/[^/?]+$"},
        data={"method": "GET", "pattern": r"model[^?]*$"},
        num_before=9,
    ),
    "gs": Requests(
        create={"method": "POST", "pattern": r"/upload/.*\.parts%2F0{16}"},
        part={"method": "POST", "pattern": r"/upload/.*\.parts%2F(?!0{16})"},
        complete={"method": "POST", "pattern": "/compose"},
        commit={"method": "POST", "pattern": r"/upload/.*name=run%2Factorsnap\.json&"},
        data={"method": "GET", "pattern": "model.*alt=media"},
        num_before=3,
    ),
}


def requests_of(server: Store) -> Requests:
    return _REQUESTS[server.scheme]


def keys_of(server: Store, bucket: str) -> list[str]:
    """All keys of a bucket, as another client sees them."""
    if isinstance(server, GcsServer):
        with urllib.request.urlopen(f"{server.endpoint}/storage/v1/b/{bucket}/o") as answer:
            return [item["name"] for item in json.load(answer).get("items", ())]
    client = server.client()
    found = client.list_objects_v2(Bucket=bucket)
    client.close()
    assert not found["IsTruncated"]
    return [item["Key"] for item in found.get("Contents", ())]


def uploads_of(server: Store, bucket: str) -> list[str]:
    """The keys of all unfinished uploads of a bucket, or of all components of objects."""
    if isinstance(server, GcsServer):
        return [key for key in keys_of(server, bucket) if ".parts/" in key]
    client = server.client()
    found: dict[str, Any] = client.list_multipart_uploads(Bucket=bucket)
    client.close()
    return [upload["Key"] for upload in found.get("Uploads", ())]
