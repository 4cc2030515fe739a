"""The training's side of a mirror: starts the process that uploads, receives its messages, and lists the bucket.

A job is one checkpoint to mirror: a line of JSON that :meth:`Mirror.send` writes to the process, which answers with the
job's outcome ("mirrored", "failed" or "skipped"). "The process" in this file is always that one. Only the first rank
sends jobs, and so only it has a process; the mirrors of other ranks list the bucket.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pickle
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import is_pair
from tensorferry.checkpoint.errors import MirrorError
from tensorferry.checkpoint.steps import name_of
from tensorferry.transfer.remote import import_obstore, usable_obstore

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

# A request that uploads a part may take this long; obstore's 30 seconds are too short for slow networks. The process
# gets these timeouts as environment variables: if they were options of the store, the store would ignore all of its
# other settings in the environment.
_TIMEOUTS = {f"{each}_TIMEOUT": "120s" for each in ("AWS", "AZURE", "GOOGLE")}
# The time without a message from the process until it counts as stuck.
_STUCK_SECONDS = 900.0
# The time for the process to end once its standard input is closed: it aborts its upload, for at most 10 seconds.
_END_SECONDS = 15.0
_PIPE_NBYTES = 1 << 16
# The beginning of each line that the process sends.
MESSAGE = b"tensorferry: "
# Objects of this age that belong to no checkpoint were left by a process that has ended.
_LEFTOVER_SECONDS = 86_400.0


class Mirror:
    """The mirror of a training's checkpoints.

    Parameters
    ----------
    where : str or (store, prefix)
        As for :class:`Checkpoints`.
    keep_last, keep_every : int, optional
        The limits for checkpoints in the bucket.
    rate : int, optional
        The maximum upload rate in bytes per second.
    """

    def __init__(
        self,
        where: str | tuple[ObjectStore, str],
        *,
        keep_last: int | None,
        keep_every: int | None,
        rate: int | None,
    ) -> None:
        self._store, self._prefix = _store(where)
        self._name = where if isinstance(where, str) else f"{where[0]!r}, {where[1]!r}"
        store = _pickled(self._store)
        self._settings: dict[str, Any] = {"store": store, "prefix": self._prefix, "rate": rate}
        self._settings |= {"keep_last": keep_last, "keep_every": keep_every}
        self._settings["leftover_age"] = _LEFTOVER_SECONDS
        # The step of the last go_back(), and its number from the sequence that also numbers the jobs. Every job has
        # both until one of these jobs is in the bucket.
        self._back_to: tuple[int, int] | None = None
        self._numbers = itertools.count(1)
        self._number = 0  # of the last job
        self._step: int | None = None  # of the last job, while its outcome is unknown
        # The failure of the last job, and whether it has been reported.
        self._failure, self._is_reported = "", True
        self._process: subprocess.Popen[bytes] | None = None
        self._received, self._last_message_at = b"", 0.0
        # Messages that problems() has not returned yet, except the failure of the last job, which is in _failure.
        self._notes: list[str] = []

    def __repr__(self) -> str:
        return self._name

    def send(self, step: int, path: Path, *, replace: bool, damaged: list[int]) -> None:
        """Start to mirror a checkpoint. Failures are not raised here: problems(), wait() and check() report them."""
        self._notes = self.problems()
        job: dict[str, Any] = {"step": step, "replace": replace, "damaged": damaged}
        job |= {"number": next(self._numbers), "back_to": self._back_to}
        job["path"] = os.path.abspath(path)  # noqa: PTH100
        for _ in range(2):  # a process that has ended is replaced once
            try:
                if self._process is None:
                    self._start()
                self._write(job)
                break
            except Exception as error:  # an error of the mirror must not fail the save
                self._end(why := f"its process could not be reached: {error}", kill=True)
        else:
            self._fail(step, why)
            return
        self._number, self._step, self._failure = job["number"], step, ""
        self._last_message_at = time.monotonic()

    def go_back(self, step: int) -> None:
        """Make the next job set aside checkpoints that are newer than ``step``, which has been restored."""
        self._back_to = step, next(self._numbers)

    def problems(self) -> list[str]:
        """Return the new messages since the last call: about saves that have not been mirrored, and other problems."""
        self._receive()
        found, self._notes = self._notes, []
        if not self._is_reported:
            found, self._is_reported = [*found, self._failure], True
        return found

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the last job; return whether it is in the bucket, or there was none.

        Raises
        ------
        MirrorError
            The job has failed.
        """
        deadline = time.monotonic() + seconds
        self._receive()
        while self._step is not None and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        if self._failure:
            self._is_reported = True
            raise MirrorError(self._failure)
        return self._step is None

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints in the bucket, in order."""
        from tensorferry.checkpoint.mirror.bucket import FAILURES, Bucket, describe_error

        usable_obstore()  # raises in a child that was forked after obstore's first use
        try:
            return Bucket(self._store, self._prefix).steps()
        except FAILURES as error:
            raise MirrorError(
                f"the contents of {self} cannot be listed: {describe_error(error)}"
            ) from error

    def place(self, step: int) -> tuple[ObjectStore, str]:
        """Return store and key of a step's checkpoint, for a reader."""
        name = name_of(step)
        return self._store, f"{self._prefix}/{name}" if self._prefix else name

    def close(self) -> None:
        """End the process, and with it an unfinished job."""
        self._end("the training ended before")

    def detach(self) -> None:
        """Detach from the process in a forked child, because it belongs to the parent."""
        if self._process is not None:
            # Popen would wait for a process that is not a child of this one.
            self._process.returncode = 0
            for pipe in filter(None, (self._process.stdin, self._process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process, self._step, self._notes = None, None, []
        self._failure, self._is_reported = "", True

    def _start(self) -> None:
        # Lower the priority first. Pass the program's sys.path, because the program may have changed it.
        program = f"import os, sys; os.nice(19); sys.path[:] = {sys.path!r}\n"
        program += "from tensorferry.checkpoint.mirror.process import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_TIMEOUTS | os.environ,
            start_new_session=True,  # keeps Ctrl-C from reaching the process
        )
        self._received, self._last_message_at = b"", time.monotonic()
        self._write(self._settings | {"process": os.getpid()})

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        left = memoryview(f"{json.dumps(message)}\n".encode())
        while left:
            left = left[self._process.stdin.write(left) :]

    def _receive(self, seconds: float = 0) -> None:
        """Receive messages, waiting up to ``seconds``; detect that the process has ended or is stuck."""
        if self._process is None or self._process.stdout is None:
            return
        out = self._process.stdout
        poll = select.poll()
        poll.register(out, select.POLLIN)
        while poll.poll(1000 * seconds):
            piece = os.read(out.fileno(), _PIPE_NBYTES)
            if not piece:
                self._end(f"its process has ended with {self._process.wait()}")
                return
            *lines, self._received = (self._received + piece).split(b"\n")
            self._last_message_at, seconds = time.monotonic(), 0
            for line in lines:
                # Skip all other lines: something else may print in the process, such as Python's sitecustomize.
                if line.startswith(MESSAGE):
                    self._handle(json.loads(line.removeprefix(MESSAGE)))
        silent = time.monotonic() - self._last_message_at
        if self._step is not None and silent > _STUCK_SECONDS:
            self._end(f"its process has sent no message for {silent:.0f} s", kill=True)

    def _handle(self, message: dict[str, Any]) -> None:
        is_last = message["number"] == self._number
        if message["outcome"] in ("failed", "skipped"):
            if is_last:
                self._fail(message["step"], message["why"])
            else:
                self._notes.append(self._message(message["step"], message["why"]))
        self._notes += [f"{self}: {note}" for note in message.get("notes", [])]
        if message["outcome"] == "mirrored" and message["back_to"] == [*(self._back_to or ())]:
            self._back_to = None
        if is_last:
            self._step = None

    def _fail(self, step: int, why: str) -> None:
        self._step, self._failure, self._is_reported = None, self._message(step, why), False

    def _message(self, step: int, why: str) -> str:
        return f"step {step} is not in the mirror {self}: {why}"

    def _end(self, why: str, *, kill: bool = False) -> None:
        if self._step is not None:
            self._fail(self._step, why)
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError), process:
            if kill:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _store(where: Any) -> tuple[Any, str]:
    """Return a store, and the prefix of all keys in it.

    Raises
    ------
    ImportError
        obstore is not installed.
    TypeError, ValueError
        ``where`` is not a valid place for a mirror.
    """
    obstore = import_obstore()
    if is_pair(where):
        return where[0], where[1].strip("/")
    if not isinstance(where, str):
        raise TypeError(f"mirror: must be an address or (store, prefix) (got {where!r})")
    try:
        return obstore.store.from_url(where), ""
    except Exception as error:
        raise ValueError(f"mirror: {where!r}: {str(error).partition(chr(10))[0]}") from error


def _pickled(store: Any) -> str:
    """Return a store as text, for the separate process."""
    try:
        return base64.b64encode(pickle.dumps(store)).decode()
    except Exception as error:
        raise TypeError(
            f"mirror: {store!r} cannot be pickled, which the separate process requires: {error}"
        ) from error
