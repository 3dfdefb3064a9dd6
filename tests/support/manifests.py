# SPDX-License-Identifier: Apache-2.0
"""Rank manifests as JSON documents, to be read and changed without the package's own schema."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from actorsnap.format.checksum import crc32c
from actorsnap.format.manifest import seal


def document_of(data: bytes) -> dict[str, Any]:
    """Returns a manifest of any form, as one document without checksums."""
    head, *lines = data.splitlines()
    document: dict[str, Any] = json.loads(head)
    for name in ("crc32c", "pages", "paths"):
        document.pop(name, None)
    return (
        document if "entries" in document else document | {"entries": list(map(json.loads, lines))}
    )


def encoded(document: dict[str, Any]) -> bytes:
    """Returns the manifest of a document, with the checksums that fit."""
    head = {name: value for name, value in document.items() if name != "entries"}
    if "tables" not in document.get("save", {}).get("features", ()):
        return _json(document) if "save" not in document else seal(_json(document))
    lines = [_json(entry) + b"\n" for entry in document["entries"]]
    pages = [b"".join(lines[at : at + 16]) for at in range(0, len(lines), 16)]
    paths = [crc32c(str(entry.get("path", "")).encode()) for entry in document["entries"]]
    packed = base64.b64encode(struct.pack(f"<{len(paths)}I", *paths)).decode()
    table = {"pages": [[len(page), crc32c(page)] for page in pages], "paths": packed}
    return seal(_json(table | head)) + b"\n" + b"".join(pages)


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
