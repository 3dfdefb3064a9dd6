# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a call while it blocks its caller: a bar per phase on a terminal and in a
notebook, a plain line on stderr per ten seconds elsewhere.

A thread draws: neither the caller nor the runtime's loop waits for a terminal. It reads the amounts
ten times a second, so the call only counts. rich is imported by the first bar on a terminal.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import html
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Self, TextIO, TypeAlias, TypeVar

import anyio

from actorsnap.actors.trace import ProgressBoard
from actorsnap.log import Log
from actorsnap.runtime.host import Host, Script, wait_done
from actorsnap.runtime.script import is_in_kernel
from actorsnap.runtime.texts import size_text
from actorsnap.wording import printable

T = TypeVar("T")

logger = Log(__name__)

_FIRST_S = 0.5
"""Time before a call gets bars: shorter calls would flicker."""

_DRAW_S = 0.1
"""Time between two drawings."""

_NOTEBOOK_S = 0.25
"""Time between two drawings in a notebook, each of which is a message."""

_LINE_S = 10.0
"""Time between two plain lines."""

_PATIENCE_S = 1.0
"""Longest wait for a terminal at the end of a call."""


class Amount(NamedTuple):
    """Bytes of a phase. ``total_bytes`` is 0 until it is known."""

    phase: str
    done_bytes: int
    total_bytes: int


Look: TypeAlias = Callable[[], Sequence[Amount]]
"""Returns the amounts of all phases; on any thread, and never blocks."""


class Output:
    """Output on which the calls of a save, or of a manager, draw one after another.

    In a notebook: one output per cell. Hold ``lock`` from the look at the amounts on.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._drawings: list[_Drawing] = []  # the last is that of ``_cell``
        self._cell: object = None

    @property
    def is_drawn(self) -> bool:
        """Whether the cell that runs now has it. Only in a notebook."""
        return bool(self._drawings) and self._cell == _running_cell()

    def draw(self, url: str, bundle: dict[str, str]) -> None:
        """Shows a drawing in the cell that runs now, in place of the earlier one."""
        if self.is_drawn:
            self._drawings[-1].change(url, bundle)
        else:
            self._cell = _running_cell()
            display = import_module("IPython.display").display
            handle = display(bundle, raw=True, display_id=True)
            self._drawings.append(_Drawing(handle, contextvars.copy_context(), url, bundle))

    def end(self, url: str, bundle: dict[str, str]) -> None:
        """Shows the end of a save in all cells that show the save."""
        for drawing in self._drawings:
            if drawing.url == url:
                drawing.change(url, bundle)
        self._drawings = [d for d in self._drawings[:-1] if d.url != url] + self._drawings[-1:]


@dataclass(slots=True)
class _Drawing:
    """One output of a cell. ``context`` is the cell's; ``url`` is of the save that it shows."""

    handle: Any
    context: contextvars.Context
    url: str
    bundle: dict[str, str]

    def change(self, url: str, bundle: dict[str, str]) -> None:
        if bundle != self.bundle:
            self.context.run(self.handle.update, bundle, raw=True)
        self.url, self.bundle = url, bundle


class ByteCount:
    """Bytes done; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done_bytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done_bytes += nbytes


def of_save(board: ProgressBoard) -> Look:
    """Returns the phases of a save."""

    def look() -> Sequence[Amount]:
        now = board.latest
        return (
            Amount("staging", now.staged_bytes, now.total_bytes),
            Amount("storing", now.stored_bytes, now.total_bytes),
        )

    return look


def when_ended(output: Output, look: Look, url: str) -> Callable[[object], None]:
    """Returns a function that shows the end of a save, also if no call waits for it.

    Only in a notebook: bars on a terminal go with the call that drew them.
    """
    if not is_in_kernel():
        return lambda _: None

    def draw() -> None:
        with output.lock:
            output.end(url, _bundle(_without_nothing(look()), url))

    return lambda _: _in_thread(draw)


def shown(
    script: Script[T],
    look: Look,
    url: str,
    *,
    is_on: bool,
    output: Output | None = None,
    has_end: bool = True,
) -> Script[T]:
    """Runs a script and shows its progress, if ``is_on``.

    Args:
        output, has_end: See ``Display``.
    """
    if not is_on:
        return (yield from script)
    display = Display(look, url, has_lines=True, output=output, has_end=has_end)
    display.start()
    try:
        result = yield from script
    except Exception:
        yield display.finish
        raise
    except BaseException:  # the caller left: no further step
        display.stop()
        raise
    yield display.finish
    return result


class Display:
    """Shows amounts from ``start`` to ``stop``.

    Args:
        url: URL of the snapshot, without secrets; empty for none.
        has_lines: Write plain lines on stderr where bars cannot be shown.
        output: Where an earlier call for the same save, or manager, has drawn.
        has_end: Leave the last state visible. If False, a later call for the same save does.
    """

    def __init__(
        self,
        look: Look,
        url: str = "",
        *,
        has_lines: bool,
        output: Output | None = None,
        has_end: bool = True,
    ) -> None:
        self._look = look
        self._url = url
        self._has_lines = has_lines
        self._output = output or Output()
        self._has_end = has_end
        self._is_stopped = threading.Event()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> None:
        if is_in_kernel():
            # From the context ipykernel learns which cell has this output.
            context = contextvars.copy_context()
            self._begin(lambda: context.run(self._draw_in_notebook))
        elif _is_terminal():
            self._begin(self._draw_on_terminal)
        elif self._has_lines:
            self._begin(self._write_lines)
        else:
            self._ended.set_result(None)

    def stop(self) -> None:
        """Ends it soon."""
        self._is_stopped.set()

    async def finish(self, _: Host) -> None:
        """Ends it; returns when the terminal is clean."""
        self.stop()
        with anyio.move_on_after(_PATIENCE_S):
            await wait_done(self._ended)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        with suppress(TimeoutError):
            self._ended.result(_PATIENCE_S)

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except ModuleNotFoundError as error:
                logger.warning(
                    "bars need %s, so progress is in plain lines: pip install 'actorsnap[cli]'",
                    (error.name or "rich").partition(".")[0],
                )
                if self._has_lines:
                    self._write_lines()
            except Exception:
                logger.warning("progress cannot be shown", exc_info=True)
            finally:
                self._ended.set_result(None)

        _in_thread(run)

    def _draw_on_terminal(self) -> None:
        # Not ``sys.stderr``: if the terminal is paused, this thread would hold its lock for ever.
        with open(
            os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace"
        ) as terminal:
            self._draw(terminal)

    def _draw_in_notebook(self) -> None:
        """Updates one output until stopped, and leaves it.

        By display messages: ipykernel sends them from any thread. Those of widgets must come from
        its main thread, which ``actorsnap.sync`` blocks.
        """
        self._is_stopped.wait(_FIRST_S)
        output, drawn = self._output, None
        while True:
            is_last = self._is_stopped.is_set()
            with output.lock:
                amounts = self._look()
                if is_last:
                    amounts = _without_nothing(amounts)
                is_wanted = output.is_drawn or (amounts and (not is_last or self._has_end))
                if amounts != drawn and is_wanted:
                    output.draw(self._url, _bundle(amounts, self._url))
            if is_last:
                return
            drawn = amounts
            self._is_stopped.wait(_NOTEBOOK_S)

    def _draw(self, terminal: TextIO) -> None:
        if self._is_stopped.wait(_FIRST_S):
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            Task,
            TextColumn,
            TransferSpeedColumn,
        )
        from rich.text import Text

        class SteadyConsole(Console):
            def show_cursor(self, show: bool = True) -> bool:
                """Does nothing: a killed process would leave the cursor hidden."""
                return False

        class Size(DownloadColumn):
            """Shows nothing, instead of ``0/? bytes``, until the total is known."""

            def render(self, task: Task) -> Text:
                return Text() if task.total is None else super().render(task)

        class Speed(TransferSpeedColumn):
            def render(self, task: Task) -> Text:
                return Text() if task.speed is None else super().render(task)

        # It does not redirect stdout: other threads write there at the same time.
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            Size(binary_units=True),
            Speed(),
            console=SteadyConsole(file=terminal),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        tasks = {
            amount.phase: bar.add_task(f"{amount.phase} {_name(self._url)}".rstrip(), total=None)
            for amount in self._look()
        }
        with bar:
            while True:
                is_last = self._is_stopped.is_set()
                for phase, done, total in self._look():
                    bar.update(tasks[phase], completed=done, total=total or None)
                bar.refresh()
                if is_last:
                    return
                self._is_stopped.wait(_DRAW_S)

    def _write_lines(self) -> None:
        """Writes a line now and then, and one at the end.

        Log records at level INFO would not do: Python shows them only if logging is configured.
        """
        is_last = False
        while not is_last:
            is_last = self._is_stopped.wait(_LINE_S)
            amounts = self._look()
            if is_last and not (self._has_end and _without_nothing(amounts)):
                return
            line = f"{self._url}: {', '.join(_text(amount) for amount in amounts)}"
            with suppress(AttributeError, OSError, ValueError):  # no stderr, or a closed one
                sys.stderr.write(f"{printable(line)}\n")
                sys.stderr.flush()


def _is_terminal() -> bool:
    """Whether stderr can move its cursor.

    Programs that a notebook's cell starts by ``!`` have a terminal, but the cell keeps all frames.
    """
    if "JPY_PARENT_PID" in os.environ:
        return False
    try:
        return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # None in a program without streams; closed
        return False


def _running_cell() -> object:
    """Returns the number of the cell that runs now in the kernel."""
    return getattr(import_module("IPython").get_ipython(), "execution_count", None)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="actorsnap-progress", daemon=True).start()


def _name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _without_nothing(amounts: Sequence[Amount]) -> Sequence[Amount]:
    """Returns the amounts; none if nothing was begun, as in a call that was refused."""
    return amounts if any(each.done_bytes or each.total_bytes for each in amounts) else ()


def _bundle(amounts: Sequence[Amount], url: str) -> dict[str, str]:
    """Returns a drawing for front ends of Jupyter, by MIME type."""
    name = _name(url)
    rows = []
    for amount in amounts:
        share = f' value="{amount.done_bytes}" max="{amount.total_bytes}"' * (
            amount.total_bytes > 0
        )
        text = html.escape(f"{name} {_text(amount)}".lstrip())
        rows.append(f"<div><progress{share}></progress> {text}</div>")
    plain = [f"{name} {_text(amount)}".lstrip() for amount in amounts]
    return {"text/plain": "\n".join(plain), "text/html": "".join(rows)}


def _text(amount: Amount) -> str:
    total = size_text(amount.total_bytes) if amount.total_bytes else "an unknown total"
    return f"{amount.phase} {size_text(amount.done_bytes)} of {total}"
