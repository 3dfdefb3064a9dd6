"""Log lines with fields, whatever the application has made of its logging.

A save must not fail, nor wait for ever, because of a line: records of the application may have
fields of these names already (``logging.setLogRecordFactory``), and its factories, filters and
handlers may raise.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from types import TracebackType

from actorsnap.errors import text_of

__all__ = ["Lines"]

_Failure = (
    bool
    | BaseException
    | tuple[type[BaseException], BaseException, TracebackType | None]
    | tuple[None, None, None]
    | None
)


class Lines(logging.LoggerAdapter[logging.Logger]):
    """The logger of a module, of the module's name. What it logs never raises: what a handler does
    is shown as ``logging`` shows its own failures.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(  # where all other methods of an adapter end
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: _Failure = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
        **_: object,
    ) -> None:
        """Logs a line with the fields ``extra``; those that all records of the application have
        stay its own.
        """
        if not self.isEnabledFor(level):
            return
        # Another package's exception may raise while it is formatted.
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
        except (Exception, SystemExit):  # a handler's exit would end the runtime's loop only
            with contextlib.suppress(Exception):  # the exception of ``exc_info`` cannot be shown
                logging.Handler().handleError(record)
