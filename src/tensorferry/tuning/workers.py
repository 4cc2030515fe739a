"""Worker processes for measurements. The crash of a worker is reported as an error, and workers end with their parent.

A worker creates an object of a class, given as "module:Class". It then calls the object's methods, one at a time, as
its parent requests. The worker ends when its parent tells it to, or when its standard input is closed. If only that
happens, because the parent was killed, the worker first calls the object's ``on_orphaned`` to clean up.

Workers ignore Ctrl-C, SIGTERM and SIGHUP, which a terminal sends to the whole process group: their parent ends them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_EXIT_SECONDS = 20.0
_CALL_SECONDS_MAX = 3600.0
_SERVE = "from tensorferry.tuning.workers import serve; serve()"


class WorkerError(Exception):
    """A worker's call failed, or its process died. The message has the reason."""


class UnavailableError(Exception):
    """A tool, library or permission that a measurement needs is missing. The message names it."""


class Worker:
    """A worker process, which is started by the first call.

    Parameters
    ----------
    target : str
        "module:Class". The other arguments are those of the class.
    environment : dict
        Additional environment variables for the process.
    """

    def __init__(
        self, target: str, *arguments: Any, environment: dict[str, str] | None = None, **named: Any
    ) -> None:
        self._constructor_call = target, arguments, named
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._unavailable: str | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method in the process, and return its result.

        Raises
        ------
        WorkerError
            The method raised, or the process died.
        UnavailableError
            The object cannot be created on this machine.
        """
        self.begin(name, *arguments, **named)
        return self.end()

    def begin(self, name: str, *arguments: Any, **named: Any) -> None:
        """Begin a call of a method. :meth:`end` returns its result."""
        if self._unavailable:
            raise UnavailableError(self._unavailable)
        if self._process is None:
            self._start()
        self._send((name, arguments, named))

    def end(self) -> Any:
        """Wait for the call, and return its result."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(_CALL_SECONDS_MAX, expire)
        timer.daemon = True  # if Ctrl-C interrupts before the `try`, the timer must not keep this process alive
        try:
            timer.start()
            kind, answer = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            reason = self._exit_reason()
            if expired.is_set():
                reason = f"it was killed, because a call took longer than {_CALL_SECONDS_MAX:g} s"
            raise WorkerError(reason) from None
        finally:
            timer.cancel()
        if kind == "unavailable":
            self._stop()
            self._unavailable = answer
            raise UnavailableError(answer)
        if kind == "error":
            raise WorkerError(answer)
        return answer

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the call has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def close(self, *, kill: bool = False) -> None:
        """End the process after its current call or, with ``kill``, at once."""
        self._stop(kill)
        self._log.close()

    def _start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            # PYTHONSAFEPATH keeps Python from importing files in the current folder.
            env=os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"} | self._environment,
        )
        self._send(self._constructor_call)
        try:
            self.end()
        except WorkerError:  # the process has no object, so a later call starts another process
            self._stop()
            raise

    def _send(self, message: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the process has died, end() reports it
            self._process.stdin.write(pickle.dumps(message))

    def _stop(self, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        elif process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                # None is a regular end, for which on_orphaned() is not called.
                process.stdin.write(pickle.dumps(None))
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _exit_reason(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        code = process.wait()
        if code >= 0:
            words = f"it exited with status {code}"
        else:
            name = signal.Signals(-code).name
            words = f"it was killed by {name}"
            words += "; likely cause: out of memory" if name == "SIGKILL" else ""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        last = [line for line in lines if line][-1:]
        return words + (f" ({last[0][:160]})" if last else "")


def call_all(workers: Sequence[Worker], name: str, *arguments: Any) -> list[Any]:
    """Call a method of several workers at the same time, and return their results when all are done.

    Raises
    ------
    WorkerError, UnavailableError
        As for :meth:`Worker.call`. The first error is raised at once, and the processes whose calls have not ended are
        killed. A later call starts them again.
    """
    answers: dict[int, Any] = {}
    numbers: dict[int, int] = {}
    number = 0
    try:
        for number, worker in enumerate(workers):
            worker.begin(name, *arguments)
            numbers[worker.fileno()] = number
        while len(answers) < len(workers):
            for ready in wait([f for f, number in numbers.items() if number not in answers]):
                number = numbers[cast("int", ready)]
                answers[number] = workers[number].end()
    except BaseException as error:
        failed = isinstance(error, (UnavailableError, WorkerError))
        # Kill the workers whose answers are still missing. Otherwise the next call would take these answers for its
        # own.
        for other in set(range(len(workers))) - answers.keys() - ({number} if failed else set()):
            workers[other]._stop(kill=True)
        if failed:
            raise type(error)(f"process {number}: {error}") from None
        raise
    return [answers[number] for number in range(len(workers))]


@contextlib.contextmanager
def closing(workers: list[Worker]) -> Iterator[list[Worker]]:
    """End all workers in the list at the end of the block. Kill them if the block raises."""
    kill = True
    try:
        yield workers
        kill = False
    finally:
        for worker in workers:
            worker.close(kill=kill)


def serve() -> None:
    """Answer calls until the parent ends the worker or closes the pipe. This is the main function of a worker."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of libraries must not be mixed with the answers
    answer: tuple[str, Any] = "result", None
    served: Any = None
    try:
        target, arguments, named = pickle.load(calls)
        module, _, name = target.partition(":")
        try:
            served = getattr(importlib.import_module(module), name)(*arguments, **named)
        except (UnavailableError, ImportError) as reason:
            answer = "unavailable", _describe(reason)
        except Exception as error:
            answer = "error", _describe(error)
        while True:
            answers.write(pickle.dumps(answer))
            answers.flush()
            call = pickle.load(calls)
            if call is None:
                return
            name, arguments, named = call
            try:
                answer = "result", getattr(served, name)(*arguments, **named)
            except UnavailableError as reason:
                answer = "error", str(reason)
            except Exception as error:
                traceback.print_exc()
                answer = "error", _describe(error)
    except (EOFError, BrokenPipeError):
        if hasattr(served, "on_orphaned"):
            served.on_orphaned()


def _describe(error: Exception) -> str:
    if isinstance(error, (OSError, UnavailableError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
