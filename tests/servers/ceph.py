# SPDX-License-Identifier: Apache-2.0
"""Ceph's S3 gateway over a cluster of one node that keeps its objects in memory.

Debian packages ceph-mon, ceph-osd, radosgw, ceph-common. One monitor, one object store, one
gateway, as the current user: about 2 s to start, 350 MiB of memory and what is stored.
No manager: it only reports.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import time
import uuid
from typing import NamedTuple

from tests.servers.base import HOST, S3Server, free_port, missing_programs

__all__ = ["CephServer", "Keys"]

_CAPABILITIES = {
    "mon.": {"mon": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *"},
}


class Keys(NamedTuple):
    """Of one user of the gateway."""

    access_key: str
    secret_key: str


class CephServer(S3Server):
    # The cluster is full at 95 % of it. What is deleted is freed within seconds.
    max_bytes = 6 << 30

    @classmethod
    def missing(cls) -> str | None:
        return missing_programs(
            "ceph-mon",
            "ceph-osd",
            "radosgw",
            "radosgw-admin",
            "rados",
            "ceph",
            "monmaptool",
            "setpriv",
        )

    def make_user(self, name: str) -> Keys:
        """A second user, who may do nothing in buckets of the first but what a bucket policy
        grants ``arn:aws:iam:::user/<name>``."""
        keys = Keys(f"KEY-{name}", f"secret-{name}")
        self._make_user(name, keys)
        return keys

    def num_pieces(self) -> int:
        """How many pieces of objects the cluster holds, of all buckets; those included that are
        deleted but not freed."""
        pool = ("-p", "default.rgw.buckets.data")
        return len(self._run("rados", *self._conf, *pool, "ls").splitlines())

    def _launch(self) -> None:
        cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
        monitor = f"[v2:{HOST}:{free_port()}/0]"
        monmap, keyring = str(self.folder / "monmap"), self.folder / "keyring"
        (self.folder / "osd").mkdir()
        (self.folder / "ceph.conf").write_text(self._config(cluster, monitor))
        keyring.write_text("".join(_keyring_entry(name) for name in _CAPABILITIES))
        self._run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitor, monmap)
        mkfs = ("--mkfs", "--monmap", monmap, "--keyring", str(keyring))
        self._run("ceph-mon", *self._conf, "-i", "a", *mkfs)
        self._spawn("ceph-mon", *self._conf, "-i", "a", "-f")
        self._run("ceph", *self._conf, "--connect-timeout", "20", "osd", "create", osd, "0")
        self._run("ceph-osd", *self._conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", *self._conf, "-i", "0", "-f")
        self._make_user("tests", Keys(self.access_key, self.secret_key))
        self._spawn("radosgw", *self._conf, "-n", "client.admin", "-f")

    @property
    def _conf(self) -> tuple[str, str]:
        return "-c", str(self.folder / "ceph.conf")

    def _make_user(self, name: str, keys: Keys) -> None:
        self._run(
            *("radosgw-admin", *self._conf, "user", "create", "--uid", name),
            *("--display-name", name),
            *("--access-key", keys.access_key, "--secret-key", keys.secret_key),
        )

    def _config(self, cluster: str, monitor: str) -> str:
        return f"""
[global]
fsid = {cluster}
mon host = {monitor}
public addr = {HOST}
public network = {HOST}/32
ms bind msgr1 = false
keyring = {self.folder}/keyring
mon data = {self.folder}/mon
osd data = {self.folder}/osd
run dir = {self.folder}
crash dir = {self.folder}
log file = {self.folder}/$name.log
admin socket =
pid file =

# Each change of the cluster's map is one proposal, and 20 make a cluster: by default they are
# a second apart.
paxos propose interval = 0.02
paxos min wait = 0.01
# A monitor ends by default where 5 % of the file system are free, and its store is tiny.
mon data avail warn = 0
mon data avail crit = 0

osd objectstore = memstore
memstore device bytes = {self.max_bytes}
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0

rgw frontends = beast endpoint={HOST}:{self.port}
# The tails of deleted objects stay for hours by default, in memory here.
rgw gc obj min wait = 1
rgw gc processor period = 1
"""


def _keyring_entry(name: str) -> str:
    """An entity with a new key, as ``ceph-authtool --gen-key`` writes it."""
    secret = os.urandom(16)
    key = base64.b64encode(struct.pack("<HIIH", 1, int(time.time()), 0, len(secret)) + secret)
    lines = [f"[{name}]", f"key = {key.decode()}"]
    lines += [f"caps {who} = {json.dumps(what)}" for who, what in _CAPABILITIES[name].items()]
    return "\n".join(lines) + "\n"
