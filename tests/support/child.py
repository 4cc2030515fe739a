"""Calls functions in separate processes, for tests that would end this process or change it permanently.

Each process is forked by a server that has imported other packages and nothing of ours, because these imports need half
a second of CPU time, or three with torch. The function's result is sent as JSON before the child leaves the
interpreter, so a test can also check how it leaves.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]
IDLE_MAX = 4
IMPORTS = ["asyncio", "numpy", "pytest"]
# The child reads these variables when it needs them. A difference in any other variable needs another server, because
# it may have changed how the server started.
READ_LATE = {"PYTEST_CURRENT_TEST", "TENSORFERRY_ENGINE", "TENSORFERRY_SLOW_CALLS"}


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    result: Any
    returncode: int
    output: str


def call(
    function: str,
    /,
    *,
    timeout_s: float = 600,
    prefix: Sequence[str] = (),
    imports: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Ended:
    """Call `module:function` with arguments (JSON) in a new process; fail unless that exits with 0.

    `prefix` is a command that executes another command; `imports` are modules that it has imported beforehand. Paths
    are passed as strings.
    """
    plain = as_json(arguments)
    variables = os.environ | dict(environment or {})
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as result:
        server = _Server.idle([*prefix], [*IMPORTS, *imports], variables, output)
        message = json.dumps([function, plain, variables])
        returncode = server.call(message, [output.fileno(), result.fileno()], timeout_s)
        for file in (output, result):
            file.seek(0)
        said = output.read()
        assert returncode is not None, f"{function} did not end in {timeout_s} s:\n{said}"
        return ended(function, returncode, said, result.read())


def as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with paths as strings."""
    return {k: str(v) if isinstance(v, os.PathLike) else v for k, v in arguments.items()}


def ended(function: str, returncode: int, said: str, result: str) -> Ended:
    """Return how it ended; fail unless it exited with 0 and gave a result."""
    assert returncode == 0, f"{function} exited with {returncode}:\n{said}"
    assert result, f"{function} gave no result:\n{said}"
    return Ended(json.loads(result), returncode, said)


class _Server:
    """A process that forks one child after another."""

    _idle: list[_Server] = []  # noqa: RUF012

    def __init__(
        self, prefix: list[str], imports: list[str], environment: dict[str, str], output: IO[str]
    ) -> None:
        self._socket, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [*prefix, sys.executable, "-X", "faulthandler", "-m", "tests.support.child"]
        with its_own:
            self._process = subprocess.Popen(
                [*command, str(its_own.fileno()), *imports],
                cwd=ROOT,
                env=environment,
                pass_fds=[its_own.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @classmethod
    def idle(
        cls, prefix: list[str], imports: list[str], environment: dict[str, str], output: IO[str]
    ) -> _Server:
        """Return an idle server that was started with these arguments, or a new one."""
        early = {name: value for name, value in environment.items() if name not in READ_LATE}
        started = (prefix, imports, early)
        for server in cls._idle:
            if server._started == started:
                cls._idle.remove(server)
                return server
        server = cls(prefix, imports, environment, output)
        server._started = started
        return server

    def call(self, message: str, descriptors: list[int], timeout_s: float) -> int | None:
        """Have a child do this; return how it exited, or None if it had to be killed."""
        deadline = time.monotonic() + timeout_s
        child = None
        try:
            socket.send_fds(self._socket, [message.encode()], descriptors)
            self._socket.settimeout(timeout_s)
            child = int(self._socket.recv(64))
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            status = int(self._socket.recv(64))
        except TimeoutError:
            os.kill(child or self._process.pid, signal.SIGKILL)
            self._end()
            return None
        except (OSError, ValueError):  # it has ended instead
            self._end()
            return self._process.returncode
        self._idle.append(self)
        if len(self._idle) > IDLE_MAX:
            self._idle.pop(0)._end()
        return os.waitstatus_to_exitcode(status)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(descriptor: str, *imports: str) -> None:
    """Have a child answer each request; every child returns from here when it has."""
    requests = socket.socket(fileno=int(descriptor))
    requests.set_inheritable(False)
    for module in imports:
        importlib.import_module(module)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        function, arguments, variables = json.loads(message)
        for name in READ_LATE - variables.keys():
            os.environ.pop(name, None)
        os.environ.update(variables)
        child = os.fork()
        if child == 0:
            break
        for file in descriptors:
            os.close(file)
        requests.send(str(child).encode())
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(BrokenPipeError):  # the test has stopped waiting
            requests.send(str(status).encode())
    requests.close()
    output, descriptor = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    answer(function, arguments, descriptor)


def answer(function: str, arguments: dict[str, Any], descriptor: int) -> None:
    """Call `module:function`, and write its result to the descriptor."""
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**arguments)
    with os.fdopen(descriptor, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    serve(*sys.argv[1:])
