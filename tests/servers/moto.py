# SPDX-License-Identifier: Apache-2.0
"""moto's server: a mock of S3 that knows what the small ones do not (SSE, KMS, tags, classes).

PyPI's moto[s3] with flask, which is what its server needs to serve S3 alone.
"""

from __future__ import annotations

import importlib.util
import sys

from tests.servers.base import HOST, S3Server, missing_programs

__all__ = ["MotoServer"]


class MotoServer(S3Server):
    @classmethod
    def missing(cls) -> str | None:
        for package in ("moto", "flask", "flask_cors"):
            if importlib.util.find_spec(package) is None:
                return f"not installed: {package}"
        return missing_programs("setpriv")

    def _launch(self) -> None:
        command = (sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port))
        self._spawn(*command, env={"PYTHONWARNINGS": "ignore"})
