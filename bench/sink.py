# SPDX-License-Identifier: Apache-2.0
"""An object store that costs next to nothing: what is left of a run is the client.

``python -I -S bench/sink.py PORT`` serves S3 and the JSON interface of Google Cloud Storage on
127.0.0.1, for everyone, until its standard input ends. Only the standard library: a benchmark
starts it, in a process of its own, and cannot share anything with it.

- What is uploaded is thrown away, in the kernel (``MSG_TRUNC``), and read back as zeros, from
  pages that ``sendfile`` does not copy. Sizes and the checksums that clients claim are kept.
- Objects of one request and up to 4 MiB are kept, so that a snapshot can be opened again.
- In buckets whose names begin with ``kept`` everything is kept: what clients send can be seen.
"""

from __future__ import annotations

import base64
import itertools
import json
import mmap
import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from html import escape, unescape
from urllib.parse import parse_qs, unquote, urlsplit

MIB = 1 << 20
KEPT_BYTES = 4 * MIB
"""Of an object that one request makes."""

STEP = 4 * MIB
NONE = "AAAAAA=="
"""A checksum where there has to be one, and the client has told none."""

DATE = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
ISO_DATE = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())

_numbers = itertools.count(1)
# Never written to: received bytes do not come up to here. So it takes no memory.
_nowhere = mmap.mmap(-1, STEP)
_zeros = os.memfd_create("zeros")
os.write(_zeros, bytes(STEP))


@dataclass(slots=True)
class Blob:
    """An object or a part. ``data`` is None where it reads as zeros."""

    size: int
    data: bytes | None
    crc32c: str | None = None
    etag: str = field(default_factory=lambda: f"{next(_numbers):032x}")


@dataclass(slots=True)
class Upload:
    """Multipart of S3: parts by number. Resumable of Google: the first part grows."""

    bucket: str
    key: str
    crc32c: str | None = None
    parts: dict[int, Blob] = field(default_factory=dict)

    def whole(self) -> Blob:
        """The parts, joined."""
        parts = [part for _, part in sorted(self.parts.items())]
        kept = [part.data for part in parts if part.data is not None]
        data = b"".join(kept) if len(kept) == len(parts) else None
        return Blob(sum(part.size for part in parts), data, self.crc32c or combined(parts))


def combined(parts: list[Blob]) -> str | None:
    """The CRC32C of parts, joined, from theirs."""
    value = 0
    for part in parts:
        if part.crc32c is None:
            return None
        factor, power, n = 1 << 31, 1 << 23, part.size  # x**0, x**8
        while n:
            if n & 1:
                factor = product(factor, power)
            power, n = product(power, power), n >> 1
        value = product(value, factor) ^ int.from_bytes(base64.b64decode(part.crc32c), "big")
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def product(a: int, b: int) -> int:
    """Of two polynomials over GF(2), modulo Castagnoli's; bit 31 is the coefficient of x**0."""
    found = 0
    while a:
        if a & 1 << 31:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (0x82F63B78 if b & 1 else 0)
    return found


_objects: dict[str, dict[str, Blob]] = {}
_uploads: dict[str, Upload] = {}


@dataclass(slots=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    blob: tuple[Blob, int, int] | None = None
    """An object whose bytes ``[start, stop)`` are the body."""


class HungUp(Exception):
    """The client has closed its connection."""


class Request:
    """One request on a connection; its body has not been read yet."""

    def __init__(self, connection: socket.socket, head: bytes, rest: bytes) -> None:
        line, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = line.split(" ", 2)
        self.headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        url = urlsplit(self.target)
        self.path = url.path
        self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        self.length = int(self.headers.get("content-length", 0))
        self._connection = connection
        self._rest = rest
        if self.headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    @property
    def is_framed(self) -> bool:
        """Whether S3's own chunks, signed or with trailers, are in the body."""
        return self.headers.get("x-amz-content-sha256", "").startswith("STREAMING-")

    def blob(self, *, is_kept: bool, crc32c: str | None = None) -> Blob:
        """The body as an object."""
        if is_kept or self.is_chunked:
            data = self.read()
            return Blob(len(data), data if is_kept else None, crc32c)
        size = int(self.headers.get("x-amz-decoded-content-length", self.length))
        self.drop()
        return Blob(size, None, crc32c)

    def drop(self, but: int = 0) -> bytes:
        """Throws the body away, but for its last bytes, which are returned."""
        here = max(0, min(len(self._rest), self.length - but))
        self._rest = self._rest[here:]
        left = self.length - but - here
        while left > 0:
            received = self._connection.recv_into(_nowhere, min(left, STEP), socket.MSG_TRUNC)
            if not received:
                raise HungUp
            left -= received
        return self._take(but)

    def read(self) -> bytes:
        """The body, without framing."""
        if not self.is_chunked:
            data = self._take(self.length)
            return self._unframed(data) if self.is_framed else data
        chunks = []
        while size := int(self._line().partition(b";")[0], 16):
            chunks.append(self._take(size))
            self._line()
        while self._line():
            pass
        return b"".join(chunks)

    @staticmethod
    def _unframed(data: bytes) -> bytes:
        chunks: list[bytes] = []
        at = 0
        while True:
            end = data.index(b"\r\n", at)
            size = int(data[at:end].partition(b";")[0], 16)
            if not size:
                return b"".join(chunks)
            chunks.append(data[end + 2 : end + 2 + size])
            at = end + 2 + size + 2

    def _take(self, size: int) -> bytes:
        data = bytearray(size)
        have = min(size, len(self._rest))
        data[:have], self._rest = self._rest[:have], self._rest[have:]
        view = memoryview(data)[have:]
        while view:
            received = self._connection.recv_into(view)
            if not received:
                raise HungUp
            view = view[received:]
        return bytes(data)

    def _line(self) -> bytes:
        while b"\r\n" not in self._rest:
            received = self._connection.recv(65536)
            if not received:
                raise HungUp
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line

    def peek(self, size: int) -> bytes:
        """The begin of the body, which can still be read or dropped."""
        while len(self._rest) < min(size, self.length):
            received = self._connection.recv(65536)
            if not received:
                raise HungUp
            self._rest += received
        return self._rest

    def end(self) -> bytes:
        """What has come behind the body. The body has to be read."""
        return self._rest


def ranged(request: Request, blob: Blob, headers: dict[str, str]) -> Answer:
    """An object, or the range of it that is asked for."""
    start, stop, status = 0, blob.size, 200
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if found and blob.size:
        first, last = found.groups()
        if first:
            start, stop = int(first), min(blob.size, int(last) + 1 if last else blob.size)
        else:
            start = max(0, blob.size - int(last))
        if start >= blob.size:
            return Answer(416, b"", {"Content-Range": f"bytes */{blob.size}"})
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
    headers |= {"ETag": f'"{blob.etag}"', "Last-Modified": DATE, "Accept-Ranges": "bytes"}
    return Answer(status, b"", headers, (blob, start, stop))


# S3 -----------------------------------------------------------------------------------------


def xml(name: str, inner: str, status: int = 200, **headers: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml", **headers})


def s3_error(status: int, code: str) -> Answer:
    return xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)


def s3(request: Request) -> Answer:
    bucket, _, key = unquote(request.path.lstrip("/")).partition("/")
    objects = _objects.setdefault(bucket, {})
    if not key:
        return s3_bucket(request, objects)
    if "uploads" in request.query or "uploadId" in request.query:
        return s3_upload(request, bucket, key)
    if request.method == "PUT":
        if request.headers.get("if-none-match") == "*" and key in objects:
            request.drop()
            return s3_error(412, "PreconditionFailed")
        if source := request.headers.get("x-amz-copy-source"):
            request.drop()
            return s3_copy(objects, key, unquote(source).lstrip("/"))
        crc32c = request.headers.get("x-amz-checksum-crc32c")
        is_kept = bucket.startswith("kept") or request.length <= KEPT_BYTES
        objects[key] = blob = request.blob(is_kept=is_kept, crc32c=crc32c)
        return Answer(headers=stored(blob))
    request.drop()
    if request.method == "DELETE":
        objects.pop(key, None)
        return Answer(204)
    if key not in objects:
        return s3_error(404, "NoSuchKey")
    return ranged(request, objects[key], {"Content-Type": "application/octet-stream"})


def stored(blob: Blob) -> dict[str, str]:
    headers = {"ETag": f'"{blob.etag}"'}
    if blob.crc32c is not None:
        headers["x-amz-checksum-crc32c"] = blob.crc32c
    return headers


def s3_copy(objects: dict[str, Blob], key: str, source: str) -> Answer:
    """A part is never copied: nobody asks for that."""
    bucket, _, name = source.partition("?")[0].partition("/")
    blob = _objects.get(bucket, {}).get(name)
    if blob is None:
        return s3_error(404, "NoSuchKey")
    objects[key] = blob
    inner = f'<ETag>"{blob.etag}"</ETag><LastModified>{ISO_DATE}</LastModified>'
    return xml("CopyObjectResult", inner)


def s3_bucket(request: Request, objects: dict[str, Blob]) -> Answer:
    if request.method == "POST":
        for key in re.findall(rb"<Key>(.*?)</Key>", request.read(), re.DOTALL):
            objects.pop(unescape(key.decode()), None)
        return xml("DeleteResult", "")
    request.drop()
    if request.method == "DELETE":  # a benchmark's own need: S3 refuses while objects are there
        objects.clear()
        return Answer(204)
    if request.method != "GET":
        return Answer()
    if "uploads" in request.query:
        return xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
    if "list-type" not in request.query and "prefix" not in request.query:
        return xml("LocationConstraint", "")
    contents, folders = listed(request, objects)
    inner = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{ISO_DATE}</LastModified>"
        f'<ETag>"{blob.etag}"</ETag><Size>{blob.size}</Size></Contents>'
        for key, blob in contents
    ) + "".join(
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders
    )
    count = len(contents) + len(folders)
    return xml(
        "ListBucketResult",
        f"<IsTruncated>false</IsTruncated><KeyCount>{count}</KeyCount>{inner}",
    )


def listed(request: Request, objects: dict[str, Blob]) -> tuple[list[tuple[str, Blob]], list[str]]:
    """Objects and folders below the query's prefix, all on one page."""
    prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter")
    contents, folders = [], set()
    for key, blob in sorted(objects.items()):
        if not key.startswith(prefix):
            continue
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if found:
            folders.add(prefix + head + found)
        else:
            contents.append((key, blob))
    return contents, sorted(folders)


def s3_upload(request: Request, bucket: str, key: str) -> Answer:
    if "uploads" in request.query:
        request.drop()
        upload_id = f"upload-{next(_numbers)}"
        _uploads[upload_id] = Upload(bucket, key)
        return xml("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
    upload_id = request.query["uploadId"]
    upload = _uploads.get(upload_id)
    if upload is None:
        request.drop()
        return s3_error(404, "NoSuchUpload")
    if request.method == "PUT":
        crc32c = request.headers.get("x-amz-checksum-crc32c")
        blob = request.blob(is_kept=bucket.startswith("kept"), crc32c=crc32c)
        upload.parts[int(request.query["partNumber"])] = blob
        return Answer(headers=stored(blob))
    request.drop()
    if request.method == "GET":
        return xml(
            "ListPartsResult",
            "<IsTruncated>false</IsTruncated>"
            + "".join(part_xml(number, part) for number, part in sorted(upload.parts.items())),
        )
    del _uploads[upload_id]
    if request.method == "DELETE":
        return Answer(204)
    whole = _objects.setdefault(bucket, {})[key] = upload.whole()
    inner = f'<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>"{whole.etag}"</ETag>'
    return xml("CompleteMultipartUploadResult", inner)


def part_xml(number: int, part: Blob) -> str:
    crc32c = f"<ChecksumCRC32C>{part.crc32c}</ChecksumCRC32C>" if part.crc32c else ""
    return (
        f"<Part><PartNumber>{number}</PartNumber><LastModified>{ISO_DATE}</LastModified>"
        f'<ETag>"{part.etag}"</ETag><Size>{part.size}</Size>{crc32c}</Part>'
    )


# Google Cloud Storage -----------------------------------------------------------------------


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    return Answer(
        status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers}
    )


def resource(bucket: str, key: str, blob: Blob) -> dict[str, object]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{key}/1",
        "name": key,
        "bucket": bucket,
        "generation": "1",
        "metageneration": "1",
        "size": str(blob.size),
        "etag": blob.etag,
        "timeCreated": ISO_DATE,
        "updated": ISO_DATE,
        **({} if blob.crc32c is None else {"crc32c": blob.crc32c}),
    }


def gs(request: Request) -> Answer:
    is_upload = request.path.startswith(("/upload/", "/resumable/"))
    rest = request.path.partition("/storage/v1/b")[2].lstrip("/")
    bucket, _, name = rest.partition("/")
    key = unquote(name.removeprefix("o").removeprefix("/"))
    objects = _objects.setdefault(bucket, {})
    if is_upload:
        return gs_upload(request, bucket, objects)
    if request.method == "POST" and key.endswith("/compose"):
        return gs_compose(request, bucket, key.removesuffix("/compose"), objects)
    body = request.read()
    if not bucket or not name:
        return as_json({"name": bucket or json.loads(body)["name"], "location": "SINK"})
    if not key:
        contents, folders = listed(request, objects)
        items = [{"crc32c": NONE, **resource(bucket, key, blob)} for key, blob in contents]
        return as_json({"kind": "storage#objects", "items": items, "prefixes": folders})
    if key not in objects:
        return as_json({"error": {"code": 404, "message": "not found"}}, 404)
    if request.method == "DELETE":
        del objects[key]
        return Answer(204)
    if request.query.get("alt") == "media" or request.path.startswith("/download/"):
        return ranged(request, objects[key], {"X-Goog-Generation": "1"})
    return as_json(resource(bucket, key, objects[key]))


def gs_compose(request: Request, bucket: str, key: str, objects: dict[str, Blob]) -> Answer:
    sources = [each["name"] for each in json.loads(request.read())["sourceObjects"]]
    upload = Upload(bucket, key)
    upload.parts = {number: objects[name] for number, name in enumerate(sources)}
    objects[key] = upload.whole()
    return as_json(resource(bucket, key, objects[key]))


def gs_upload(request: Request, bucket: str, objects: dict[str, Blob]) -> Answer:
    is_kept = bucket.startswith("kept")
    claimed = re.search(r"crc32c=([^, ]+)", request.headers.get("x-goog-hash", ""))
    crc32c = claimed[1] if claimed else None
    if upload_id := request.query.get("upload_id"):
        return gs_chunk(request, _uploads[upload_id], crc32c, is_kept=is_kept)
    if request.query["uploadType"] == "resumable":
        described = json.loads(request.read() or b"{}")
        upload_id = f"upload-{next(_numbers)}"
        key = request.query.get("name") or described["name"]
        _uploads[upload_id] = Upload(bucket, key, described.get("crc32c"))
        path = f"/resumable/storage/v1/b/{bucket}/o?upload_id={upload_id}"
        return Answer(headers={"Location": f"http://{request.headers['host']}{path}"})
    key = request.query.get("name", "")
    if request.query["uploadType"] == "media":
        blob = request.blob(is_kept=is_kept or request.length <= KEPT_BYTES, crc32c=crc32c)
    else:
        key, blob = gs_multipart(request, key, crc32c, is_kept=is_kept)
    if request.query.get("ifGenerationMatch") == "0" and key in objects:
        return as_json({"error": {"code": 412, "message": "conditionNotMet"}}, 412)
    objects[key] = blob
    return as_json(resource(bucket, key, blob))


def gs_multipart(
    request: Request, key: str, crc32c: str | None, *, is_kept: bool
) -> tuple[str, Blob]:
    """Metadata and bytes in one body."""
    boundary = request.headers["content-type"].partition("boundary=")[2].strip("\"'").encode()
    if is_kept or request.is_chunked or request.length <= KEPT_BYTES:
        head = tail = body = request.read()
        size = len(body)
    else:
        head = request.peek(4096)  # the metadata comes first, and is short
        tail = request.drop(but=256)
        body, size = None, request.length
    newline = b"\r\n" if b"\r\n" in head[:256] else b"\n"
    described_at = head.index(2 * newline) + 2 * len(newline)
    described_end = head.index(b"--" + boundary, described_at)
    described = json.loads(head[described_at:described_end])
    begin = head.index(2 * newline, described_end) + 2 * len(newline)
    end = size - len(tail) + tail.rindex(newline + b"--" + boundary)
    is_kept = is_kept or size <= KEPT_BYTES
    data = body[begin:end] if body is not None and is_kept else None
    blob = Blob(end - begin, data, described.get("crc32c", crc32c))
    return described.get("name", key), blob


def gs_batch(request: Request) -> Answer:
    """Several deletions in one body."""
    boundary = "--answer"
    answers = []
    calls = re.findall(rb"Content-ID: <(.*?)>\r\n\r\nDELETE \S*/b/(.*?)/o/(\S*)", request.read())
    for number, bucket, name in [[each.decode() for each in call] for call in calls]:
        key = unquote(name.partition("?")[0])
        status = 404 if _objects.get(bucket, {}).pop(key, None) is None else 204
        answers.append(
            f"{boundary}\r\nContent-Type: application/http\r\nContent-ID: <response-{number}>\r\n"
            f"\r\nHTTP/1.1 {status} -\r\n\r\n\r\n"
        )
    body = "".join([*answers, f"{boundary}--\r\n"]).encode()
    return Answer(200, body, {"Content-Type": "multipart/mixed; boundary=answer"})


def gs_chunk(request: Request, upload: Upload, crc32c: str | None, *, is_kept: bool) -> Answer:
    _, total = request.headers.get("content-range", "bytes */*").rsplit("/", 1)
    upload.parts[len(upload.parts)] = request.blob(is_kept=is_kept)
    upload.crc32c = upload.crc32c or crc32c
    whole = upload.whole()
    if total != "*" and whole.size < int(total):
        return Answer(308, b"", {"Range": f"bytes=0-{whole.size - 1}"})
    _objects.setdefault(upload.bucket, {})[upload.key] = whole
    return as_json(resource(upload.bucket, upload.key, whole))


# Connections --------------------------------------------------------------------------------


def answered(request: Request) -> Answer:
    if request.path == "/batch/storage/v1":
        return gs_batch(request)
    if "/storage/v1/b" in request.path:
        return gs(request)
    return s3(request)


def serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rest = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in rest:
                received = connection.recv(65536)
                if not received:
                    return
                rest += received
            head, _, rest = rest.partition(b"\r\n\r\n")
            request = Request(connection, head, rest)
            try:
                answer = answered(request)
                send(connection, answer, is_head=request.method == "HEAD")
            except (HungUp, ConnectionError):
                return
            rest = request.end()


def send(connection: socket.socket, answer: Answer, *, is_head: bool) -> None:
    blob, start, stop = answer.blob or (None, 0, len(answer.body))
    head = [f"HTTP/1.1 {answer.status} -", f"Date: {DATE}"]
    head += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status != 204:
        head.append(f"Content-Length: {stop - start}")
    text = "\r\n".join(head).encode() + b"\r\n\r\n"
    if is_head or blob is None:
        connection.sendall(text if is_head else text + answer.body)
        return
    if blob.data is not None:
        connection.sendall(text)
        connection.sendall(memoryview(blob.data)[start:stop])
        return
    connection.sendall(text)
    left = stop - start
    while left:
        left -= os.sendfile(connection.fileno(), _zeros, 0, min(left, STEP))


def main(port: int) -> None:
    server = socket.create_server(("127.0.0.1", port), backlog=128)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
