"""An interpreter that has imported torch already: it starts programs in a tenth of a second instead of three seconds.

`python()` is a command that replaces `sys.executable`. It asks a server, which has imported parts of torch and nothing
of ours, to fork a process with its arguments, environment, folder and open files. It forwards signals, and ends in the
same way as that process. It is also the program's `sys.executable`, so children of the program start as fast.

Use it for tests of what programs do. Tests of how programs start, what they import, and of limits that children inherit
need fresh processes. Tests of examples use `python("torch")`, because these have to import other modules themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.spawn
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

from tests.support.child import ROOT, Ended, as_json, ended

PRELOADED = (
    "numpy",
    "rich.progress",
    "torch._dynamo",
    "torch._inductor.compile_fx",  # DeepSpeed asks torch.compile for it
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "typer",
)

_CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys

arguments = sys.argv[1:]
if arguments[0] == "-B":  # as multiprocessing passes it on
    del arguments[0]
if arguments[0][0] == "-" and arguments[0] not in ("-c", "-m", "-u") or "LD_PRELOAD" in os.environ:
    os.execv({python!r}, [{python!r}, *arguments])
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):
            files.append(int(name))
    except OSError:
        pass  # that was the folder itself
ending = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # until it is known to whom they go
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([arguments, os.getcwd(), dict(os.environ), files]).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
server.sendmsg([len(request).to_bytes(8, "little")], rights)
server.sendall(request)


def receive():
    return int.from_bytes(server.recv(8) or sys.exit("the server is gone"), "little", signed=True)


process = receive()
for number in ending:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
for file in files:
    os.close(file)  # who reads from a pipe waits for all who may write
status = receive()
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def python(*modules: str, interpreter: str = sys.executable) -> str:
    """Return the command; its server has imported these modules, or PRELOADED, and ends with this process.

    `interpreter` is run instead of this process's: that of another environment.
    """
    folder, owner = Path(tempfile.mkdtemp(prefix="warm-")), os.getpid()
    client, address = folder / "python", str(folder / "socket")
    client.write_text(_CLIENT.format(python=interpreter, address=address))
    client.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [interpreter, "-m", __name__, str(listener.fileno()), str(client), *modules],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is not for it
        )

    def stop() -> None:
        if os.getpid() == owner:
            server.communicate()
            shutil.rmtree(folder)

    atexit.register(stop)
    return str(client)


def call(
    function: str,
    /,
    *,
    timeout_s: float = 600,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> Ended:
    """Do as `child.call` in a program of `python()`."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as result:
        program = "from tests.support import child; child.answer"
        program += repr((function, as_json(arguments), result.fileno()))
        done = subprocess.run(
            [python(), "-c", program],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[result.fileno()],
            timeout=timeout_s,
        )
        for file in (output, result):
            file.seek(0)
        return ended(function, done.returncode, output.read(), result.read())


def _serve(listener: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """Fork for each request, until standard input ends; return, in the children, the program to run."""
    # For each program: the process, its descriptor, and the socket of the request.
    programs: list[tuple[int, int, socket.socket]] = []
    while True:
        waited_for = [part for _, *parts in programs for part in parts]
        ready = select.select([0, listener, *waited_for], [], [])[0]
        if 0 in ready:
            sys.exit()
        for program in programs[:]:
            process, descriptor, client = program
            if client in ready:  # it was killed
                os.kill(process, signal.SIGKILL)
            if descriptor in ready:
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(OSError):
                    client.sendall(status.to_bytes(8, "little", signed=True))
                client.close()
                os.close(descriptor)
                programs.remove(program)
        if listener in ready:
            client = listener.accept()[0]
            try:
                header, given, _, _ = socket.recv_fds(client, 8, 250)
                with client.makefile("rb") as stream:
                    request = json.loads(stream.read(int.from_bytes(header, "little")))
            except (OSError, ValueError):  # it was killed
                client.close()
                continue
            process = os.fork()
            if process == 0:
                for each in (listener, client, *(client for _, _, client in programs)):
                    each.detach()
                return _with_files(given, *request)
            for file in given:
                os.close(file)
            with contextlib.suppress(OSError):
                client.sendall(process.to_bytes(8, "little", signed=True))
            programs.append((process, os.pidfd_open(process), client))


def _with_files(given: list[int], *request: Any) -> tuple[list[str], str, dict[str, str]]:
    """Give the received files the numbers that they have in the sender, and close all others."""
    *rest, numbers = request
    above = max([*given, *numbers]) + 1
    lifted = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in given]
    os.closerange(0, above)
    for file, number in zip(lifted, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    return tuple(rest)  # type: ignore[return-value]


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Initialize the process as the interpreter does at its start."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    exec((ROOT / "src" / "tensorferry_startup.pth").read_text())
    if arguments[0] == "-u":
        del arguments[0]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    first, sys.argv = arguments[0], list(arguments)
    if first in ("-c", "-m"):
        del sys.argv[1]
    place = {"-c": "", "-m": folder}.get(first, str(Path(first).resolve().parent))
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = path if environment.get("PYTHONSAFEPATH") else [place, *path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if first == "-c":
        code = compile(arguments[1], "<string>", "exec")
    else:
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def _leave(status: int) -> None:
    """End as the interpreter does, except for clearing torch's modules, which takes 0.4 seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # it is closed
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    for module in sys.argv[3:] or PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "threads are not forked"
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.executable = sys.argv[2]
    multiprocessing.spawn.set_executable(sys.executable)
    try:
        _run(*request)
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        _leave(leaving.code or 0)
    _leave(0)
