"""What a training has of its mirror: a process that uploads behind it, what that says, and what lies in the bucket."""

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
from tensorferry.transfer.remote import imported_obstore, usable_obstore

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

# A request with a part in it takes no longer: obstore's 30 seconds are for better networks. They are variables, since a
# store that is made with options takes no others from the environment.
_TIMEOUTS = {f"{each}_TIMEOUT": "120s" for each in ("AWS", "AZURE", "GOOGLE")}
_STUCK_SECONDS = 900.0
_END_SECONDS = 15.0
_PIPE_NBYTES = 1 << 16
# Other ranks may say nothing for so long, until they are given up, or what they have left is removed.
_PATIENCE_SECONDS, _ALIVE_SECONDS = 300.0, 120.0


class Mirror:
    """The mirror of one rank.

    Parameters
    ----------
    where : str or (store, prefix)
        As for :class:`Checkpoints`.
    keep_last, keep_every : int, optional
        Which checkpoints stay.
    rate : int, optional
        Bytes in a second, of this rank.
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
        self._given = {
            "store": _pickled(self._store),
            "prefix": self._prefix,
            "rate": rate,
            "keep_last": keep_last,
            "keep_every": keep_every,
            "patience": _PATIENCE_SECONDS,
            "alive": _ALIVE_SECONDS,
        }
        self._back_to: tuple[int, int] | None = None
        self._numbers = itertools.count(1)
        self._number = 0  # of what was sent last
        self._step: int | None = None  # of that, until it is known what has become of it
        self._failure, self._is_told = "", True  # of that
        self._process: subprocess.Popen[bytes] | None = None
        self._leads = True
        self._heard, self._heard_at = b"", 0.0
        self._notes: list[str] = []

    def __repr__(self) -> str:
        return self._name

    def send(self, rank: int, step: int, path: Path, *, replace: bool, damaged: list[int]) -> None:
        """Have a checkpoint mirrored. Nothing that fails in that is raised."""
        self._notes = self.problems()
        self._leads = rank == 0
        job: dict[str, Any] = {
            "step": step,
            "replace": replace,
            "damaged": damaged,
            "back_to": self._back_to,
        }
        job |= {"number": next(self._numbers), "path": os.path.abspath(path)}  # noqa: PTH100
        for _ in range(2):  # one that has ended is replaced
            try:
                if self._process is None:
                    self._start(rank)
                self._write(job)
                break
            except Exception as error:  # whatever it is, the save has not failed
                self._end(why := f"its process could not be told: {error}", kill=True)
        else:
            self._fail(step, why)
            return
        self._number, self._step, self._failure = job["number"], step, ""
        self._heard_at = time.monotonic()

    def go_back(self, step: int) -> None:
        """Have what is newer than a step abandoned, now that one before the newest was restored."""
        self._back_to = step, next(self._numbers)

    def problems(self) -> list[str]:
        """Return what has failed, or was left out, since the last time."""
        self._hear()
        found, self._notes = self._notes, []
        if not self._is_told:
            found, self._is_told = [*found, self._failure], True
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for what was sent last, at most so long; return whether it is in the bucket, or nothing was sent.

        Raises
        ------
        MirrorError
            It will not be.
        """
        deadline = time.monotonic() + seconds
        self._hear()
        while self._step is not None and (left := deadline - time.monotonic()) > 0:
            self._hear(left)
        self.check()
        return self._step is None

    def check(self) -> bool:
        """Return True, for ranks that wait for the first one; raise MirrorError if this rank has failed."""
        self._hear()
        if self._failure:
            self._is_told = True
            raise MirrorError(self._failure)
        return True

    def unfinished(self) -> int | None:
        """Return the step whose upload has neither succeeded nor failed yet."""
        return self._step

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints in the bucket, in order."""
        from tensorferry.checkpoint.mirror.bucket import FAILURES, Bucket, said

        usable_obstore()  # it cannot be used in a child that was forked after its first use
        try:
            return Bucket(self._store, self._prefix).steps()
        except FAILURES as error:
            raise MirrorError(f"what is in {self} cannot be told: {said(error)}") from error

    def place(self, step: int) -> tuple[ObjectStore, str]:
        """Return where the checkpoint of a step is, for a reader."""
        name = name_of(step)
        return self._store, f"{self._prefix}/{name}" if self._prefix else name

    def close(self) -> None:
        """End the process; what it had not finished is given up, as the first rank says."""
        if not self._leads:
            self._step = None
        self._end("the training ended before")

    def forget(self) -> None:
        """Have no process: in a forked child it is the parent's."""
        if self._process is not None:
            self._process.returncode = 0  # nobody waits for it here
            for pipe in filter(None, (self._process.stdin, self._process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process, self._step, self._notes = None, None, []
        self._failure, self._is_told = "", True

    def _start(self, rank: int) -> None:
        # Behind the training from its first moment. The path of modules is the program's, which may have changed it.
        program = f"import os, sys; os.nice(19); sys.path[:] = {sys.path!r}\n"
        program += "from tensorferry.checkpoint.mirror.process import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_TIMEOUTS | os.environ,
            start_new_session=True,  # Ctrl-C is the training's
        )
        self._heard, self._heard_at = b"", time.monotonic()
        self._write(self._given | {"rank": rank, "process": os.getpid()})

    def _write(self, said: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        left = memoryview(f"{json.dumps(said)}\n".encode())
        while left:
            left = left[self._process.stdin.write(left) :]

    def _hear(self, seconds: float = 0) -> None:
        """Take in what the process says, and wait so long for it; find out whether it has ended, or is stuck."""
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
            *lines, self._heard = (self._heard + piece).split(b"\n")
            self._heard_at, seconds = time.monotonic(), 0
            for line in lines:
                self._take(json.loads(line))
        silent = time.monotonic() - self._heard_at
        if self._step is not None and silent > _STUCK_SECONDS:
            self._end(f"its process has given no sign of life for {silent:.0f} s", kill=True)

    def _take(self, said: dict[str, Any]) -> None:
        is_last = said["number"] == self._number
        if said["outcome"] in ("failed", "skipped"):
            if is_last:
                self._fail(said["step"], said["why"])
            else:
                self._notes.append(self._said(said["step"], said["why"]))
        self._notes += [f"{self}: {note}" for note in said.get("notes", [])]
        if said["outcome"] == "mirrored" and said["back_to"] == [*(self._back_to or ())]:
            self._back_to = None
        if is_last:
            self._step = None

    def _fail(self, step: int, why: str) -> None:
        self._step, self._failure, self._is_told = None, self._said(step, why), False

    def _said(self, step: int, why: str) -> str:
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
        There is no obstore.
    TypeError, ValueError
        It is no place for a mirror.
    """
    obstore = imported_obstore()
    if is_pair(where):
        return where[0], where[1].strip("/")
    if not isinstance(where, str):
        raise TypeError(f"mirror: an address or (store, prefix) is wanted, not {where!r}")
    try:
        return obstore.store.from_url(where), ""
    except Exception as error:
        raise ValueError(f"mirror: {where!r}: {str(error).partition(chr(10))[0]}") from error


def _pickled(store: Any) -> str:
    """Return a store as text, for a process of its own."""
    try:
        return base64.b64encode(pickle.dumps(store)).decode()
    except Exception as error:
        raise TypeError(
            f"mirror: {store!r} cannot be pickled, and a process of its own needs it: {error}"
        ) from error
