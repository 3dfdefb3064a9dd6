# SPDX-License-Identifier: Apache-2.0
"""Where notices of a preemption come from: real signals, a fake Slurm, fake metadata servers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorsnap.errors import UsageError
from actorsnap.runtime import instance_metadata
from actorsnap.runtime import notices as module
from actorsnap.runtime.notices import Notice, Watcher, notices
from tests.conftest import LeakCheck
from tests.support import forker
from tests.support.metadata import Answer, AwsMetadata, GceMetadata, Request, serve

# What each program below begins with. A kill is delivered at the latest when the next line runs.
PRELUDE = """
import asyncio, concurrent.futures, faulthandler, multiprocessing, os, signal, sys, tempfile
import threading, time
from actorsnap.runtime import notices as module
from actorsnap.runtime.notices import Notice, notices

def kill(number=signal.SIGTERM, *, after_s=0.0):
    time.sleep(after_s)
    os.kill(os.getpid(), number)
    time.sleep(0)

heard = []
again_s = 0.15
def action(number):  # the address of the C function that handles it
    return module._exchange_action(number)[:8]
module._SAME_SIGNAL_S = 0.1
def watch(*names, to=heard, grace_s=None):
    watcher = notices.signals(*names, grace_s=grace_s)
    watcher.start(lambda notice: to.append((notice.reason, notice.grace_s)))
    return watcher
def say(*words):
    print(*words, flush=True)
"""


def run(program: str, *, ends: int = 0, env: dict[str, str] | None = None) -> list[str]:
    """Runs a program in a process of its own, which has to end so; returns what it printed."""
    done = subprocess.run(
        forker.command("-W", "error", "-c", PRELUDE + program),
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ends, (done.returncode, done.stdout, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.usefixtures("forker")
class TestSignals:
    def test_the_first_is_a_notice_and_the_second_ends_the_process(self) -> None:
        said = run(
            """
watch("SIGTERM", grace_s=25)
kill(); say(heard)
kill(after_s=again_s)
say("not reached")
""",
            ends=-signal.SIGTERM,
        )
        assert said == ["[('SIGTERM', 25)]"]

    def test_two_deliveries_of_one_signal_are_one(self) -> None:
        """As from torchrun, and from a system that signals all processes of a job."""
        said = run("module._SAME_SIGNAL_S = 2.0; watch(); kill(); kill(); kill(); say(heard)")
        assert said == ["[('SIGTERM', None)]"]

    def test_each_signal_counts_by_itself(self) -> None:
        said = run(
            """
watch("SIGUSR1", "SIGTERM")
kill(signal.SIGUSR1); kill(after_s=again_s); say(heard)
kill(signal.SIGUSR1, after_s=again_s)
""",
            ends=-signal.SIGUSR1,
        )
        assert said == ["[('SIGUSR1', None), ('SIGTERM', None)]"]

    def test_an_earlier_handler_is_called_for_each(self) -> None:
        said = run(
            """
calls = []
def earlier(number, frame):
    calls.append((number, frame.f_code.co_name))
signal.signal(signal.SIGTERM, earlier)
watcher = watch()
kill(); kill(after_s=again_s)
say(heard, len(calls), calls[0])
watcher.stop()
say(signal.getsignal(signal.SIGTERM) is earlier)
kill(); say(len(heard), len(calls))
"""
        )
        assert said == ["[('SIGTERM', None)] 2 (15, 'kill')", "True", "1 3"]

    def test_an_earlier_handler_may_end_the_process(self) -> None:
        program = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
watch()
try:
    kill()
finally:
    say(heard)
"""
        assert run(program, ends=7) == ["[('SIGTERM', None)]"]

    def test_an_ignored_signal_is_a_notice_and_stays_ignored(self) -> None:
        program = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
watcher = watch("SIGHUP")
kill(signal.SIGHUP); kill(signal.SIGHUP, after_s=again_s); kill(signal.SIGHUP)
say(heard, signal.getsignal(signal.SIGHUP).name)
"""
        assert run(program) == ["[('SIGHUP', None)] SIG_IGN"]

    def test_ctrl_c_interrupts_at_the_second(self) -> None:
        program = """
signal.signal(signal.SIGINT, signal.default_int_handler)
watch("SIGINT")
kill(signal.SIGINT); say(heard)
try:
    kill(signal.SIGINT, after_s=again_s)
except KeyboardInterrupt:
    say("interrupted")
"""
        assert run(program) == ["[('SIGINT', None)]", "interrupted"]

    def test_a_handler_of_c_code_gets_the_second(self) -> None:
        """``signal.getsignal`` does not know it; for one older than Python it returns None."""
        program = """
out = tempfile.TemporaryFile("w+")
faulthandler.register(signal.SIGUSR1, out)
before = action(signal.SIGUSR1)
def num_dumps():
    out.seek(0)
    return out.read().count("most recent call first")
real = signal.getsignal
for unknown in (False, True):
    signal.getsignal = lambda number: None if unknown else real(number)
    watcher = notices.signals("SIGUSR1")
    watcher.start(lambda notice: heard.append(notice.reason))
    signal.getsignal = real
    kill(signal.SIGUSR1); say(heard, num_dumps())
    kill(signal.SIGUSR1, after_s=again_s); say(heard, num_dumps())
    say(action(signal.SIGUSR1) == before)
    watcher.stop()
watch("SIGUSR1").stop()
kill(signal.SIGUSR1); say(heard, num_dumps())
"""
        assert run(program) == [
            "['SIGUSR1'] 0",
            "['SIGUSR1'] 1",
            "True",
            "['SIGUSR1', 'SIGUSR1'] 1",
            "['SIGUSR1', 'SIGUSR1'] 2",
            "True",
            "['SIGUSR1', 'SIGUSR1'] 3",
        ]

    def test_a_loop_handler_gets_each_as_well(self) -> None:
        program = """
async def main():
    calls = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, calls.append, "loop")
    watcher = watch()
    kill(); await asyncio.sleep(0.01); say(heard, calls)
    kill(after_s=again_s); await asyncio.sleep(0.01); say(heard, calls)
    watcher.stop()
    kill(); await asyncio.sleep(0.01); say(heard, calls)
asyncio.run(main())
say(signal.getsignal(signal.SIGTERM).name)
"""
        assert run(program) == [
            "[('SIGTERM', None)] ['loop']",
            "[('SIGTERM', None)] ['loop', 'loop']",
            "[('SIGTERM', None)] ['loop', 'loop', 'loop']",
            "SIG_DFL",
        ]

    def test_a_waiting_loop_hears_at_once(self) -> None:
        program = """
async def main():
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    watcher = notices.signals()
    watcher.start(lambda notice: loop.call_soon_threadsafe(told.set))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    await asyncio.wait_for(told.wait(), 20)
    watcher.stop()
    say("told", signal.getsignal(signal.SIGTERM).name)
asyncio.run(main())
"""
        assert run(program) == ["told SIG_DFL"]

    def test_stop_leaves_a_later_handler_alone(self) -> None:
        program = """
watcher = watch()
chained, calls = signal.getsignal(signal.SIGTERM), []
def later(number, frame):
    calls.append(number)
    chained(number, frame)
signal.signal(signal.SIGTERM, later)
kill(); say(heard, calls)
watcher.stop()
say(signal.getsignal(signal.SIGTERM) is later)
kill(after_s=again_s); say(heard, calls)
"""
        assert run(program) == ["[('SIGTERM', None)] [15]", "True", "[('SIGTERM', None)] [15, 15]"]

    def test_a_later_handler_that_passes_on_does_not_save_from_the_second(self) -> None:
        program = """
watch()
chained = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: chained(*args))
kill(); say(heard)
kill(after_s=again_s)
"""
        assert run(program, ends=-signal.SIGTERM) == ["[('SIGTERM', None)]"]

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_two_watchers_stop_in_any_order(self, order: tuple[int, int]) -> None:
        program = f"""
before = action(signal.SIGTERM)
module._SAME_SIGNAL_S = 60
first, second = [], []
watchers = [watch(to=first), watch(to=second)]
kill(); say(len(first), len(second))
watchers[{order[0]}].stop()
kill(); say(len(first), len(second))
watchers[{order[1]}].stop()
say(signal.getsignal(signal.SIGTERM).name, action(signal.SIGTERM) == before)
"""
        assert run(program) == ["1 1", "1 1", "SIG_DFL True"]

    def test_two_watchers_die_at_the_second(self) -> None:
        run("watch(); watch(); kill(); kill(after_s=again_s)", ends=-signal.SIGTERM)

    def test_a_stop_in_another_thread(self) -> None:
        """Only the main thread may restore the handler: the next signal does it there."""
        program = """
watcher = watch()
with concurrent.futures.ThreadPoolExecutor() as pool:
    pool.submit(watcher.stop).result()
say("stopped")
kill()
say("not reached", heard)
"""
        assert run(program, ends=-signal.SIGTERM) == ["stopped"]

    def test_a_watcher_can_start_again(self) -> None:
        program = """
watcher = watch()
watcher.stop(); watcher.stop()
watcher.start(heard.append)
kill(); say(heard)
"""
        assert run(program) == ["[Notice(reason='SIGTERM', grace_s=None)]"]

    def test_the_main_thread_only(self) -> None:
        program = """
def work():
    try:
        watch()
    except Exception as error:
        say(type(error).__name__, error)
thread = threading.Thread(target=work, name="trainer"); thread.start(); thread.join()
say(signal.getsignal(signal.SIGTERM).name)
"""
        said, handler = run(program)
        assert said.startswith("UsageError notices.signals: only the main thread")
        assert "'trainer'" in said
        assert handler == "SIG_DFL"

    @pytest.mark.parametrize("forks_in", ["main", "thread"])
    def test_a_fork_has_the_signal_for_itself(self, forks_in: str) -> None:
        """As a data loader's worker, which its parent ends by SIGTERM."""
        program = f"""
watcher = watch()
def fork():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        signal.pause()
        os._exit(0)
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), heard)
if {forks_in == "main"}:
    fork()
else:
    thread = threading.Thread(target=fork); thread.start(); thread.join()
kill(); say(heard)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
worker.start(); worker.terminate(); worker.join()
say(worker.exitcode, len(heard))
"""
        assert run(program) == ["-15 []", "[('SIGTERM', None)]", "-15 1"]

    def test_a_fork_keeps_earlier_handlers_and_may_watch(self) -> None:
        program = """
signal.signal(signal.SIGTERM, lambda *_: say("earlier"))
watcher = watch()
pid = os.fork()
if pid == 0:
    kill(); say(heard)
    watch(); kill(); say(heard)
    os._exit(0)
os.waitpid(pid, 0)
say(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, heard)
"""
        assert run(program) == ["earlier", "[]", "earlier", "[('SIGTERM', None)]", "True []"]

    def test_a_handler_takes_no_lock(self) -> None:
        """It may run while this very thread holds any lock, as that of the log."""
        program = """
import logging
logging.basicConfig(level=logging.DEBUG)
watch()
handler, lock = logging.getLogger().handlers[0], threading.Lock()
reentrant, handler.lock = handler.lock, lock
with lock:
    kill()
handler.lock = reentrant
say(heard)
"""
        assert run(program) == ["[('SIGTERM', None)]"]


class Heard:
    """Takes the notices of a watcher, and waits for them."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self._arrived = threading.Condition()

    def __call__(self, notice: Notice) -> None:
        with self._arrived:
            self.notices.append(notice)
            self._arrived.notify_all()

    def wait(self, number: int = 1) -> list[Notice]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.notices) >= number, timeout=20)
            return self.notices


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks more often, and does not wait so long."""
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    for name, value in [
        ("_AWS_LOOK_S", 0.02),
        ("_GCE_LOOK_S", 0.02),
        ("_GCE_HANG_S", 0.4),
        ("_TIMEOUT_S", 0.5),
    ]:
        monkeypatch.setattr(instance_metadata, name, value)


@pytest.mark.usefixtures("fast")
class TestPolling:
    def test_a_file_that_appears(self, tmp_path: Path, heard: Heard, no_leaks: LeakCheck) -> None:
        path = tmp_path / "stop"
        watcher = notices.file(path, grace_s=60)
        watcher.start(heard)
        until(lambda: watcher._is_known)
        assert heard.notices == []
        path.touch()
        assert heard.wait() == [Notice(f"file {path}", 60)]
        path.write_text("again")
        time.sleep(0.1)
        assert len(heard.notices) == 1
        watcher.stop()
        watcher.stop()

    def test_a_file_of_an_earlier_run_does_not_count(self, tmp_path: Path, heard: Heard) -> None:
        path = tmp_path / "stop"
        path.touch()
        os.utime(path, (1, 1))
        watcher = notices.file(path)
        watcher.start(heard)
        until(lambda: watcher._is_known)
        time.sleep(0.1)
        assert heard.notices == []
        path.touch()
        assert heard.wait() == [Notice(f"file {path}", None)]
        watcher.stop()

    def test_a_relative_path_survives_a_change_of_folder(
        self, tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        watcher = notices.file("stop")
        monkeypatch.chdir("/")
        watcher.start(heard)
        until(lambda: watcher._is_known)
        (tmp_path / "stop").touch()
        assert heard.wait() == [Notice(f"file {tmp_path / 'stop'}", None)]
        watcher.stop()

    def test_a_path_that_cannot_be_looked_at(
        self, tmp_path: Path, heard: Heard, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "folder").touch()
        watcher = notices.file(tmp_path / "folder" / "stop")
        watcher.start(heard)
        until(lambda: caplog.records)
        watcher.stop()
        assert "notices.file: NotADirectoryError" in caplog.text

    def test_a_function(self, heard: Heard) -> None:
        answers = [None, Notice("moved", 5.0), None, Notice("moved", 4.0), Notice("now", None)]
        watcher = notices.custom(lambda: answers.pop(0) if answers else None, every_s=0.01)
        watcher.start(heard)
        until(lambda: not answers)
        assert heard.wait(2) == [Notice("moved", 5.0), Notice("now", None)]
        watcher.stop()

    def test_a_failing_function_warns_once(
        self, heard: Heard, caplog: pytest.LogCaptureFixture, no_leaks: LeakCheck
    ) -> None:
        calls = 0

        def check() -> Notice | None:
            nonlocal calls
            calls += 1
            if calls in (1, 2, 40):
                return None
            if calls > 60:
                return Notice("at last", None)
            raise RuntimeError("no such host")

        watcher = notices.custom(check, every_s=0.001)
        watcher.start(heard)
        assert heard.wait() == [Notice("at last", None)]
        watcher.stop()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "notices.custom: RuntimeError: no such host" in record.message

    def test_two_failures_are_not_worth_a_line(
        self, heard: Heard, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls = 0

        def check() -> Notice | None:
            nonlocal calls
            calls += 1
            if calls == 30:
                return Notice("end", None)
            if calls % 3:
                raise OSError
            return None

        watcher = notices.custom(check, every_s=0.001)
        watcher.start(heard)
        heard.wait()
        watcher.stop()
        assert caplog.records == []

    def test_a_function_that_returns_something_else(
        self, heard: Heard, caplog: pytest.LogCaptureFixture
    ) -> None:
        anything: Any = lambda: True  # noqa: E731
        watcher = notices.custom(anything, every_s=0.001)
        watcher.start(heard)
        until(lambda: caplog.records)
        watcher.stop()
        assert "returned True: return a Notice or None" in caplog.text
        assert heard.notices == []

    def test_a_fork_does_not_watch(self, tmp_path: Path, heard: Heard) -> None:
        watcher = notices.file(tmp_path / "stop")
        watcher.start(heard)
        until(lambda: watcher._is_known)
        pid = os.fork()
        if pid == 0:
            (tmp_path / "stop").touch()
            time.sleep(0.3)
            os._exit(len(heard.notices))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        heard.wait()
        watcher.stop()


@pytest.mark.usefixtures("fast")
class TestSlurm:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Any:
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # or a failure ends the tests
        yield
        after = signal.signal(signal.SIGUSR1, before)
        assert after is signal.SIG_IGN

    def start(self, monkeypatch: pytest.MonkeyPatch, heard: Heard, left_s: float | str) -> Watcher:
        end = left_s if isinstance(left_s, str) else str(int(time.time() + left_s))
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
        watcher = notices.slurm(before_s=100)
        watcher.start(heard)
        return watcher

    def test_elsewhere(self, monkeypatch: pytest.MonkeyPatch, heard: Heard) -> None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        before, threads = signal.getsignal(signal.SIGUSR1), threading.active_count()
        watcher = notices.slurm()
        watcher.start(heard)
        assert signal.getsignal(signal.SIGUSR1) is before
        assert threading.active_count() == threads
        watcher.stop()

    def test_the_time_limit(self, monkeypatch: pytest.MonkeyPatch, heard: Heard) -> None:
        watcher = self.start(monkeypatch, heard, 101.5)
        (notice,) = heard.wait()
        assert time.time() >= int(os.environ["SLURM_JOB_END_TIME"]) - 100
        assert notice.reason == "Slurm: the job's time limit"
        assert notice.grace_s == pytest.approx(100, abs=1)
        watcher.stop()

    @pytest.mark.parametrize(("left_s", "grace_s"), [(36000, 100), (50, 50), (-50, 100)])
    def test_its_signal(
        self, monkeypatch: pytest.MonkeyPatch, heard: Heard, left_s: float, grace_s: float
    ) -> None:
        watcher = self.start(monkeypatch, heard, left_s)
        os.kill(os.getpid(), signal.SIGUSR1)
        number = 1 if left_s > 100 else 2
        notice = next(n for n in heard.wait(number) if n.reason == "Slurm: SIGUSR1")
        assert notice.grace_s == pytest.approx(grace_s, abs=2)
        watcher.stop()

    def test_without_an_end(self, monkeypatch: pytest.MonkeyPatch, heard: Heard) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
        watcher = notices.slurm(before_s=100)
        watcher.start(heard)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait() == [Notice("Slurm: SIGUSR1", 100)]
        watcher.stop()

    def test_an_end_that_is_no_number(
        self, monkeypatch: pytest.MonkeyPatch, heard: Heard, caplog: pytest.LogCaptureFixture
    ) -> None:
        watcher = self.start(monkeypatch, heard, "NONE")
        until(lambda: caplog.records)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait() == [Notice("Slurm: SIGUSR1", 100)]
        watcher.stop()
        assert len(caplog.records) == 1


@pytest.mark.usefixtures("fast")
class TestAws:
    def test_an_interruption(self, heard: Heard) -> None:
        aws = AwsMetadata()
        with serve(aws) as url:
            watcher = notices.aws(endpoint=url)
            watcher.start(heard)
            until(lambda: len(aws.requests) > 4)
            assert heard.notices == []
            aws.interrupt(left_s=90)
            (notice,) = heard.wait()
            watcher.stop()
        assert notice.reason.startswith("AWS: spot instance: terminate at 20")
        assert notice.grace_s == pytest.approx(90, abs=2)
        assert aws.num_tokens == 1
        assert {request.path for request in aws.requests} == {
            "/latest/api/token",
            "/latest/meta-data/spot/instance-action",
        }

    @pytest.mark.parametrize("skew_s", [3600, -3600])
    def test_the_clock_of_the_server_counts(self, heard: Heard, skew_s: float) -> None:
        aws = AwsMetadata()
        aws.interrupt(left_s=90, action="stop", skew_s=skew_s)
        with serve(aws) as url:
            watcher = notices.aws(endpoint=url)
            watcher.start(heard)
            (notice,) = heard.wait()
            watcher.stop()
        assert notice.grace_s == pytest.approx(90, abs=2)

    @pytest.mark.parametrize(("left_s", "grace_s"), [(9999, 120), (-10, 0)])
    def test_a_grace_beyond_what_aws_gives(
        self, heard: Heard, left_s: float, grace_s: float
    ) -> None:
        aws = AwsMetadata()
        aws.interrupt(left_s=left_s)
        with serve(aws) as url:
            watcher = notices.aws(endpoint=url)
            watcher.start(heard)
            assert heard.wait()[0].grace_s == grace_s
            watcher.stop()

    def test_no_readable_time(self, heard: Heard) -> None:
        aws = AwsMetadata()
        aws.items["spot/instance-action"] = '{"action": "hibernate"}'
        with serve(aws) as url:
            watcher = notices.aws(endpoint=url)
            watcher.start(heard)
            assert heard.wait() == [Notice("AWS: spot instance: hibernate at None", None)]
            watcher.stop()

    def test_a_recommendation_counts_if_wanted(self, heard: Heard) -> None:
        aws = AwsMetadata()
        aws.items["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-23T08:22:00Z"}'
        deaf = Heard()
        with serve(aws) as url:
            watchers = [notices.aws(endpoint=url), notices.aws(endpoint=url, rebalance=True)]
            watchers[0].start(deaf)
            watchers[1].start(heard)
            reason = "AWS: rebalance recommendation of 2026-11-23T08:22:00Z"
            assert heard.wait() == [Notice(reason, None)]
            assert deaf.notices == []
            aws.interrupt(left_s=60)
            heard.wait(2)
            deaf.wait()
            for watcher in watchers:
                watcher.stop()

    def test_an_expired_token_is_renewed(
        self, heard: Heard, caplog: pytest.LogCaptureFixture
    ) -> None:
        aws = AwsMetadata()
        with serve(aws) as url:
            watcher = notices.aws(endpoint=url)
            watcher.start(heard)

            def expires_again() -> bool:
                aws.tokens.clear()
                return aws.num_tokens >= 4

            until(expires_again)
            aws.interrupt(left_s=60)
            heard.wait()
            watcher.stop()
        assert caplog.records == []

    def test_a_refused_token(self, heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
        """Each new token is refused: no request without a pause, and one warning."""
        aws = AwsMetadata()
        aws.trouble = lambda request: Answer(401) if request.method == "GET" else None
        with serve(aws) as url:
            watcher = notices.aws(endpoint=url)
            watcher.start(heard)
            until(lambda: len(aws.requests) >= 40)
            watcher.stop()
        (record,) = caplog.records
        assert "status 401 with a new token" in record.message


@pytest.mark.usefixtures("fast")
class TestGce:
    def test_a_preemption(self, heard: Heard, no_leaks: LeakCheck) -> None:
        gce = GceMetadata()
        with serve(gce) as url:
            watcher = notices.gce(endpoint=url)
            watcher.start(heard)
            until(lambda: len(gce.requests) >= 4)  # both values, and a hanging request for each
            assert heard.notices == []
            gce.set("preempted", "TRUE")
            assert heard.wait() == [Notice("GCE: the instance is preempted", 30)]
            watcher.stop()
        hanging = gce.requests[-1]
        assert hanging.query["wait_for_change"] == "true"
        assert hanging.query["timeout_sec"] == "0.4"

    def test_maintenance(self, heard: Heard) -> None:
        gce = GceMetadata()
        with serve(gce) as url:
            watcher = notices.gce(endpoint=url)
            watcher.start(heard)
            gce.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
            until(lambda: len(gce.requests) > 5)
            assert heard.notices == []
            gce.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
            assert heard.wait() == [Notice("GCE: host maintenance", 60)]
            gce.set("preempted", "TRUE")
            assert len(heard.wait(2)) == 2
            watcher.stop()

    def test_a_hanging_request_waits(self, heard: Heard) -> None:
        gce = GceMetadata()
        with serve(gce) as url:
            watcher = notices.gce(endpoint=url)
            watcher.start(heard)
            until(lambda: len(gce.requests) >= 2)  # both values, at once
            asked_s = time.monotonic()
            until(lambda: len(gce.requests) >= 10)  # four more each, three of which have ended
            assert time.monotonic() - asked_s > 3 * 0.4 - 0.1
            watcher.stop()

    def test_a_change_between_two_requests_is_not_missed(self, heard: Heard) -> None:
        gce = GceMetadata()
        answered = threading.Event()

        def change(request: Request) -> None:
            if "last_etag" in request.query and not answered.is_set():
                answered.set()
                gce.set("preempted", "TRUE")  # just before the server begins to wait

        gce.trouble = change
        with serve(gce) as url:
            watcher = notices.gce(endpoint=url)
            watcher.start(heard)
            heard.wait()
            watcher.stop()

    @pytest.mark.parametrize(
        "answer", [Answer(200, "TRUE"), Answer(200, "PERHAPS", {"Metadata-Flavor": "Google"})]
    )
    def test_another_server_at_its_address(
        self, heard: Heard, caplog: pytest.LogCaptureFixture, answer: Answer
    ) -> None:
        with serve(lambda _: answer) as url:
            watcher = notices.gce(endpoint=url)
            watcher.start(heard)
            until(lambda: caplog.records)
            time.sleep(0.2)
            watcher.stop()
        assert heard.notices == []
        assert f"{url}/computeMetadata" in caplog.text
        assert f"not an answer of Google: '{answer.body}'" in caplog.text

    def test_a_server_that_does_not_wait_is_asked_with_pauses(
        self, heard: Heard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(instance_metadata, "_GCE_LOOK_S", 0.2)
        gce = GceMetadata()
        gce.trouble = lambda _: Answer(200, "FALSE", {"Metadata-Flavor": "Google"})
        with serve(gce) as url:
            watcher = notices.gce(endpoint=url)
            watcher.start(heard)
            asked_s = time.monotonic()
            until(lambda: len(gce.requests) >= 8)
            assert time.monotonic() - asked_s > 3 * 0.2 - 0.1
            watcher.stop()


def drip(_: Request) -> Answer:
    time.sleep(1)
    return Answer(500)


BROKEN: dict[str, Callable[[Request], Answer]] = {
    "404": lambda _: Answer(404),
    "403": lambda _: Answer(403),
    "503": lambda _: Answer(503),
    "redirect": lambda _: Answer(302, headers={"Location": "http://127.0.0.1:9/"}),
    "portal": lambda _: Answer(200, "<html>Please log in</html>"),
    "list": lambda _: Answer(200, "[]"),
    "binary": lambda _: Answer(raw=b"\x00\xff\xfe\r\n\r\n"),
    "endless": lambda _: Answer(raw=b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n"),
    "truncated": lambda _: Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
    "closed": lambda _: Answer(raw=b""),
    "slow": drip,
}


@pytest.mark.usefixtures("fast")
@pytest.mark.few
@pytest.mark.parametrize("source", ["aws", "gce"])
@pytest.mark.parametrize("trouble", [*BROKEN, "absent"])
def test_a_broken_server_costs_one_warning(
    source: str,
    trouble: str,
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if trouble == "slow":
        monkeypatch.setattr(instance_metadata, "_TIMEOUT_S", 0.05)
        monkeypatch.setattr(instance_metadata, "_GCE_HANG_S", 0)
    num_asked = 0
    is_broken = True
    whole: Any = AwsMetadata() if source == "aws" else GceMetadata()

    def respond(request: Request) -> Answer:
        nonlocal num_asked
        num_asked += 1
        return BROKEN[trouble](request) if is_broken else whole(request)

    with serve(respond) as url:
        if trouble == "absent":
            url = "http://127.0.0.1:9"
        watcher = notices.aws(endpoint=url) if source == "aws" else notices.gce(endpoint=url)
        watcher.start(heard)
        until(lambda: caplog.records)
        if trouble == "absent":
            time.sleep(0.2)
        else:
            so_far = num_asked
            until(lambda: num_asked > so_far + 8)
            is_broken = False
            if source == "aws":
                whole.interrupt(left_s=60)
            else:
                whole.set("preempted", "TRUE")
            heard.wait()
        watcher.stop()
    assert len(caplog.records) == 1
    assert url in caplog.text
    assert ("timed out" in caplog.text) == (trouble == "slow")
    assert len(heard.notices) == (trouble != "absent")


@pytest.mark.usefixtures("fast")
def test_no_proxy_is_asked(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    aws, proxied = AwsMetadata(), list[Request]()
    aws.interrupt(left_s=60)

    def proxy(request: Request) -> Answer:
        proxied.append(request)
        return Answer(502)

    with serve(proxy) as proxy_url, serve(aws) as url:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy_url)
        watcher = notices.aws(endpoint=url)
        watcher.start(heard)
        heard.wait()
        watcher.stop()
    assert proxied == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: notices.signals("SIGTREM"), "did you mean 'SIGTERM'"),
        (lambda: notices.signals(4711), "no such signal"),
        (lambda: notices.signals("SIGKILL"), "no process can handle it"),
        (lambda: notices.signals(signal.SIGSTOP), "no process can handle it"),
        (lambda: notices.signals(grace_s=0), "grace_s=0"),
        (lambda: notices.signals(grace_s=float("nan")), "grace_s=nan"),
        (lambda: notices.slurm(before_s=-1), "before_s=-1"),
        (lambda: notices.file("x", grace_s=True), "grace_s=True"),
        (lambda: notices.file(""), "the path of a file"),
        (lambda: notices.file(None), "the path of a file"),  # type: ignore[arg-type]
        (lambda: notices.custom(None), "a function"),  # type: ignore[arg-type]
        (lambda: notices.custom(lambda: None, every_s=float("inf")), "every_s=inf"),
        (lambda: notices.aws(endpoint="169.254.169.254"), "must be like http://host:port"),
        (lambda: notices.gce(endpoint="https://x"), "must be like http://host:port"),
    ],
)
def test_bad_arguments(make: Callable[[], Watcher], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        make()


@pytest.mark.parametrize(
    "make", [lambda: notices.signals("SIGUSR2"), lambda: notices.custom(lambda: None)]
)
def test_a_watcher_serves_one_manager(make: Callable[[], Watcher], heard: Heard) -> None:
    watcher = make()
    watcher.start(heard)
    with pytest.raises(UsageError, match="one watcher for each manager"):
        watcher.start(heard)
    watcher.stop()


async def test_no_start_blocks_a_loop(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 9999))
    watchers: list[Watcher] = [
        notices.signals("SIGUSR2"),
        notices.slurm(),
        notices.file(tmp_path / "stop"),
        notices.custom(lambda: None),
        notices.aws(endpoint="http://127.0.0.1:9"),
        notices.gce(endpoint="http://127.0.0.1:9"),
    ]
    for watcher in watchers:
        watcher.start(heard)
    for watcher in watchers:
        watcher.stop()
    assert heard.notices == []


@pytest.mark.usefixtures("forker")
def test_the_import_is_cheap() -> None:
    program = """
from actorsnap.runtime.notices import notices
notices.signals("SIGTERM"); notices.slurm(); notices.file("x")
say("actorsnap.runtime.instance_metadata" in sys.modules)
notices.aws()
say("actorsnap.runtime.instance_metadata" in sys.modules)
say(threading.active_count(), signal.getsignal(signal.SIGTERM).name)
"""
    assert run(program) == ["False", "True", "1 SIG_DFL"]
