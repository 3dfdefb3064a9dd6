# SPDX-License-Identifier: Apache-2.0
"""Log lines with fields, robust against any logging setup.

A log line must not make a save fail or hang. The application's records may have fields of these
names (``logging.setLogRecordFactory``); its factories, filters and handlers may raise.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

from actorsnap.errors import text_of


class Log(logging.LoggerAdapter[logging.Logger]):
    """A module's logger. Its methods never raise; failures of handlers are reported as ``logging``
    does.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(  # called by all other methods
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
        **_: object,
    ) -> None:
        """Logs a line. ``extra`` does not replace the application's own fields."""
        if not self.isEnabledFor(level):
            return
        # Formatting a foreign exception may raise.
        args = tuple([text_of(a) if isinstance(a, BaseException) else a for a in args])
        name = self.logger.name
        record = logging.LogRecord(name, level, "", 0, msg, args, None)
        try:
            file, number, function, stack = self.logger.findCaller(stack_info, stacklevel + 1)
            if isinstance(exc_info, BaseException):
                exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
            elif not isinstance(exc_info, tuple):
                exc_info = sys.exc_info() if exc_info else None
            record = self.logger.makeRecord(
                name, level, file, number, msg, args, exc_info, function, None, stack
            )
            for field, value in (extra or {}).items():
                vars(record).setdefault(field, value)
            self.logger.handle(record)
        except (Exception, SystemExit):  # SystemExit would end only the runtime's loop
            with contextlib.suppress(Exception):  # so may formatting ``exc_info``
                logging.Handler().handleError(record)
