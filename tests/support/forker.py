# SPDX-License-Identifier: Apache-2.0
"""Programs in a fresh interpreter that has imported torch already, which takes seconds.

``command`` takes the place of ``[sys.executable, ...]`` in a call of ``subprocess``, where the
fixture ``forker`` is in use. What it starts is small: it hands its streams, its environment and its
folder to a server, which has imported torch, some small packages and nothing of ours, and forks.
The child runs the program and ends as an interpreter ends. Its exit status, or the signal that
killed it, becomes that of the process which stands for it. It has another pid, and another parent.

This file is the server's main program, too, and the client's.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

__all__ = ["command", "start"]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIMIT_S = 300
"""A child that hangs is killed by SIGALRM after so long."""

_address = ""


def start() -> subprocess.Popen[bytes]:
    """Starts the server; it ends with its standard input, or when it is terminated."""
    import subprocess

    global _address
    _address = f"actorsnap-tests-{os.getpid()}-{os.urandom(8).hex()}"
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", _address],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    server.stdout.readline()  # it listens, and imports torch while the first client waits
    return server


def command(*arguments: str) -> list[str]:
    """For ``-c program``, ``-m module`` or a script; of all other options, it takes ``-W``."""
    assert _address, "the fixture forker is not in use"
    return [sys.executable, "-I", "-S", __file__, "ask", _address, *arguments]


def _ask(address: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(f"\0{address}")
        request = {"arguments": arguments, "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        for stream in (0, 1, 2):
            os.close(stream)  # who reads the other end of a pipe waits for the child only
        status = server.makefile("rb").readline()
    if not status:
        os._exit(125)
    code = os.waitstatus_to_exitcode(int(status))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(address: str) -> list[str]:
    """Returns in each child, with its arguments."""
    import select

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address}")
    listener.listen(16)
    os.write(1, b"\n")
    import torch

    for name in ("anyio._backends._asyncio", "crc32c", "msgspec", "numpy", "psutil"):
        importlib.import_module(name)
    gc.freeze()  # or each child looks through it once more when it ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([0, listener.fileno()], [], [])
        if 0 in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            break
        client.close()
    # One that waits for it, and tells the client.
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile("rb").readline())
    pid = os.fork()
    if pid != 0:
        for each in (0, 1, 2, *streams):
            os.close(each)
        _, status = os.waitpid(pid, 0)
        client.sendall(b"%d\n" % status)
        os._exit(0)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    torch.set_num_threads(1)  # torch makes its pool anew after a fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(LIMIT_S)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    arguments: list[str] = request["arguments"]
    return arguments


def _run(arguments: list[str]) -> None:
    import runpy
    import types
    import warnings

    # As those of an interpreter, never closed.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        del arguments[:2]
    if not arguments[0].startswith("-"):
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        loader = importlib.machinery.SourceFileLoader("__main__", arguments[0])
        script = types.ModuleType("__main__")
        script.__file__ = arguments[0]
        sys.modules["__main__"] = script
        exec(loader.get_code("__main__"), vars(script))  # type: ignore[arg-type]
        return
    option, program, *rest = arguments
    sys.path[0] = ""
    sys.argv[:] = [option, *rest]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    assert option == "-c"
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(program, "<string>", "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _ask(sys.argv[2], sys.argv[3:])
    else:
        _run(_serve(sys.argv[2]))
