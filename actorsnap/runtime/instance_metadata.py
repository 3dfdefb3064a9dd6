# SPDX-License-Identifier: Apache-2.0
"""Preemption notices of cloud instances, from the metadata servers of AWS and Google.

Plain HTTP by the standard library, never through a proxy, with short timeouts. Any other answer
than those documented by the providers is a failure that ``PollingWatcher`` handles.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from actorsnap.errors import UsageError
from actorsnap.runtime.notices import Notice, PollingWatcher

_TIMEOUT_S = 2.0
"""Limit on each wait for the server, in seconds."""

_MAX_BYTES = 65536
"""Limit on a body that is read, in bytes."""

_AWS_LOOK_S = 5.0
"""Time between two requests, as AWS advises, in seconds."""

_AWS_NOTICE_S = 120.0
"""The longest notice of AWS, in seconds."""

_TOKEN_TTL_S = 21600
"""Lifetime of a token, in seconds: the longest that AWS allows."""

_GCE_HANG_S = 5
"""Time the server keeps a request while nothing changes, in seconds."""

_GCE_LOOK_S = 1.0
"""Pause between two requests, in seconds: for servers that do not wait."""


class MetadataError(Exception):
    """An answer that the provider does not document."""


@dataclass(frozen=True, slots=True)
class _Answer:
    where: str
    status: int
    headers: http.client.HTTPMessage
    body: str


class _MetadataServer:
    def __init__(self, endpoint: str, where: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise UsageError(f"{where}: endpoint={endpoint!r} must be like http://host:port")
        self._endpoint = endpoint.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        expected: tuple[int, ...] = (200,),
        hang_s: float = 0.0,
    ) -> _Answer:
        """Sends a request over a new connection.

        Raises:
            MetadataError: no answer, not one of HTTP, or its status is not one of ``expected``.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S + hang_s)
        where = f"{method} {self._endpoint}{path}"
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(_MAX_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{where}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status not in expected:
            raise MetadataError(f"{where}: status {response.status} {response.reason}")
        return _Answer(where, response.status, response.headers, body)


class AwsNotices(PollingWatcher):
    """Reports ``spot/instance-action``: EC2 is about to terminate, stop or hibernate the instance.

    Uses IMDSv2. In a container the instance needs a hop limit of 2.

    Args:
        rebalance: Treats rebalance recommendations as notices, too. They mean that an
            interruption has become more likely, not that one is certain.
        endpoint: URL of the metadata server.
    """

    def __init__(self, *, rebalance: bool, endpoint: str) -> None:
        self._server = _MetadataServer(endpoint, "notices.aws")
        self._watches_rebalance = rebalance
        self._token: str | None = None
        super().__init__("aws", self._look_at_metadata, _AWS_LOOK_S)

    def _look_at_metadata(self) -> Notice | None:
        answer = self._get("spot/instance-action")
        if answer.status == 200:
            found = _json_object(answer, "action")
            reason = f"AWS: spot instance: {found['action']} at {found.get('time')}"
            return Notice(reason, _left_s(str(found.get("time")), answer.headers.get("Date")))
        if self._watches_rebalance:
            answer = self._get("events/recommendations/rebalance")
            if answer.status == 200:
                found = _json_object(answer, "noticeTime")
                return Notice(f"AWS: rebalance recommendation of {found['noticeTime']}", None)
        return None

    def _get(self, path: str) -> _Answer:
        """Returns an answer of status 200, or 404: there is no event."""
        for _ in range(2):
            if self._token is None:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
                self._token = self._server.ask("PUT", "/latest/api/token", ttl).body.strip()
            answer = self._server.ask(
                "GET",
                f"/latest/meta-data/{path}",
                {"X-aws-ec2-metadata-token": self._token},
                expected=(200, 404, 401),
            )
            if answer.status != 401:
                return answer
            self._token = None  # it has expired
        raise MetadataError(f"{answer.where}: status 401 with a new token")


def _json_object(answer: _Answer, field: str) -> dict[str, object]:
    """Returns the object in the body; without ``field`` it is another server's."""
    try:
        found = json.loads(answer.body)
    except ValueError:
        found = None
    if not isinstance(found, dict) or field not in found:
        raise MetadataError(f"{answer.where}: no {field!r} in the answer {answer.body[:100]!r}")
    return found


def _left_s(end: str, date: str | None) -> float | None:
    """Returns the seconds until ``end``, by the server's clock if it sent the date."""
    try:
        end_s = datetime.fromisoformat(end).timestamp()
        now_s = parsedate_to_datetime(date).timestamp() if date else time.time()
    except ValueError:
        return None
    return min(max(end_s - now_s, 0.0), _AWS_NOTICE_S)


class GceNotices:
    """Reports the preemption of an instance, and maintenance that terminates it.

    A live migration does not count: the instance keeps running. The server holds each
    request until the value changes.

    Args:
        endpoint: URL of the metadata server.
    """

    def __init__(self, *, endpoint: str) -> None:
        server = _MetadataServer(endpoint, "notices.gce")
        warning = threading.Lock()
        self._watchers = [
            _GceKey(
                server,
                "preempted",
                {"FALSE": None, "TRUE": Notice("GCE: the instance is preempted", 30.0)},
                warning,
            ),
            _GceKey(
                server,
                "maintenance-event",
                {
                    "NONE": None,
                    "MIGRATE_ON_HOST_MAINTENANCE": None,
                    "TERMINATE_ON_HOST_MAINTENANCE": Notice("GCE: host maintenance", 60.0),
                },
                warning,
            ),
        ]

    def start(self, on_notice: Callable[[Notice], None]) -> None:
        for watcher in self._watchers:
            watcher.start(on_notice)

    def stop(self) -> None:
        """Ends watching. The threads end with their requests, some seconds later."""
        for watcher in self._watchers:
            watcher.stop()


class _GceKey(PollingWatcher):
    def __init__(
        self,
        server: _MetadataServer,
        key: str,
        notices: Mapping[str, Notice | None],
        warning: threading.Lock,
    ) -> None:
        self._server = server
        self._path = f"/computeMetadata/v1/instance/{key}"
        self._notices = notices
        self._etag: str | None = None
        super().__init__("gce", self._look_at_key, _GCE_LOOK_S, warning)

    def _look_at_key(self) -> Notice | None:
        query, hang_s = "", 0
        if self._etag is not None:
            hang_s = _GCE_HANG_S
            query = f"?wait_for_change=true&timeout_sec={hang_s}&last_etag={self._etag}"
        self._etag = None  # after a failure it does not wait for a change
        answer = self._server.ask(
            "GET", self._path + query, {"Metadata-Flavor": "Google"}, hang_s=hang_s
        )
        value = answer.body.strip()
        if answer.headers.get("Metadata-Flavor") != "Google" or value not in self._notices:
            raise MetadataError(f"{answer.where}: not an answer of Google: {value[:100]!r}")
        self._etag = answer.headers.get("ETag")
        return self._notices[value]
