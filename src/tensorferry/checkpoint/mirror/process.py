"""The separate process that mirrors checkpoints; it reads jobs and writes outcomes as lines of JSON.

It is not a thread of the training, but has its own interpreter, priority and process group. It ends when the training
ends: then its standard input ends, or :func:`main` sees that the training's process is gone. A job is one checkpoint to
mirror, as :mod:`tensorferry.checkpoint.mirror.mirror` sends it. The first rank's process uploads the files of all
ranks, which share the folder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import select
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.file_locks import reader_lock
from tensorferry.checkpoint.mirror.bucket import (
    FAILURES,
    Bucket,
    describe_error,
    files_in,
    is_ours,
)
from tensorferry.checkpoint.mirror.mirror import MESSAGE
from tensorferry.checkpoint.mirror.uploading import GoneError, Throttle, upload
from tensorferry.checkpoint.steps import is_permanent, superfluous
from tensorferry.checkpoint.storage.names import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

# The time for an upload to abort when the training has ended.
_END_SECONDS = 10.0
# The interval at which the training is told that an upload progresses.
_SIGN_SECONDS = 30.0


class _StoppedError(Exception):
    """The training has ended."""


class Save:
    """A local checkpoint, locked against removal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.unlock = reader_lock(self, path, METADATA_NAME)
            self.metadata = (path / METADATA_NAME).read_bytes()
        except FileNotFoundError as error:
            raise GoneError(
                f"the checkpoint {str(path)!r} was removed before it was uploaded (likely cause: newer checkpoints "
                "were saved meanwhile, and keep_last limits their number)"
            ) from error
        self.files = files_in(self.metadata)


class Uploader:
    """Mirrors the checkpoints that the training names."""

    def __init__(self, bucket: Bucket, settings: dict[str, Any]) -> None:
        self._bucket = bucket
        self._keep_last, self._keep_every = settings["keep_last"], settings["keep_every"]
        self._leftover_age = timedelta(seconds=settings["leftover_age"])
        self._throttle = Throttle(settings["rate"], self._pause)
        self._jobs: list[dict[str, Any]] = []
        self._jobs_changed = threading.Condition()
        self._stopped = threading.Event()
        self._has_progressed = False
        self._tidied = False  # whether leftovers of earlier processes have been removed
        # The "back_to" of the last job that had one: the step to which the training returned, and a number.
        self._last_back_to: Any = None
        # Steps mirrored since the last return to an older step.
        self._mirrored_steps: set[int] = set()

    def add_job(self, job: dict[str, Any] | None) -> None:
        """Add a job; None means that there will be no more."""
        with self._jobs_changed:
            if job is None:
                self._stopped.set()
            else:
                self._jobs.append(job)
            self._jobs_changed.notify()

    def run(self) -> None:
        """Run jobs until the training ends."""
        with contextlib.suppress(_StoppedError):
            while True:
                with self._jobs_changed:
                    self._jobs_changed.wait_for(lambda: self._jobs or self._stopped.is_set())
                self._pause(0)
                self._do_newest()

    def report_progress(self) -> None:
        """Report periodically that an upload progresses; runs in its own thread, while the main thread uploads."""
        while not self._stopped.wait(_SIGN_SECONDS):
            if self._has_progressed:
                self._has_progressed = False
                send()

    def _pause(self, seconds: float) -> None:
        self._has_progressed = True
        if self._stopped.wait(seconds):
            raise _StoppedError

    def _do_newest(self) -> None:
        """Mirror the newest save; older ones that are waiting are skipped."""
        with self._jobs_changed:
            *late, job = self._jobs
            self._jobs = []
        for each in late:
            why = f"step {job['step']} was saved before its upload began"
            send(each["step"], each["number"], "skipped", why)
        try:
            notes = self._mirror(job)
        except _StoppedError:
            raise
        except Exception as error:
            outcome = "skipped" if isinstance(error, GoneError) else "failed"
            send(job["step"], job["number"], outcome, describe_error(error))
            self._tidied = False
            with contextlib.suppress(*FAILURES):
                self._bucket.remove_unnamed(job["step"])
        else:
            more = {"notes": notes, "back_to": job["back_to"]}
            send(job["step"], job["number"], "mirrored", **more)

    def _mirror(self, job: dict[str, Any]) -> list[str]:
        """Upload and commit a save; return messages about problems that do not make the save fail."""
        bucket, step, back_to = self._bucket, job["step"], job["back_to"]
        if back_to is not None and back_to != self._last_back_to:
            self._last_back_to, self._mirrored_steps = back_to, set()
        save = Save(Path(job["path"]))
        there = bucket.read(step)
        if there is not None and there[0] != save.metadata:
            owned = is_ours(there[0])
            if not (owned and job["replace"]):
                remedy = (
                    " (remedies: continue from it by restore(), save with overwrite=True, or mirror to another prefix)"
                    if owned
                    else ", which no mirror made (remedy: mirror to another prefix)"
                )
                key = bucket.key(step)
                raise ValueError(f"{key}: there is another checkpoint of this step{remedy}")
        for name, stored in save.files.items():
            upload(bucket, save.path / name, bucket.key(step, name), stored, self._throttle)
        self._check(step, save)
        notes: list[str] = []
        # After a return to an older step, checkpoints of later steps must not be restored: they are set aside. But the
        # bucket must have a checkpoint at every moment. So set them aside before the commit only if the bucket also has
        # a checkpoint of the step returned to, or of an earlier one; otherwise after it.
        abandons_first = back_to is not None and any(each <= back_to[0] for each in bucket.steps())
        if abandons_first:
            notes += self._abandon(step, back_to[0])
        self._commit(step, save, there)
        self._mirrored_steps.add(step)
        try:
            bucket.remove_unnamed(step)
            if back_to is not None and not abandons_first:
                notes += self._abandon(step, back_to[0])
            if self._keep_last is not None:
                self._remove_superfluous(step, self._keep_last, job["damaged"])
            if not self._tidied:
                # Measure the age by the store's clock: it has just dated the metadata.
                now = bucket.folder(step)[METADATA_NAME]["last_modified"]
                bucket.remove_leftovers(now - self._leftover_age, step)
                self._tidied = True
        except FAILURES as error:
            self._tidied = False
            notes.append(f"a removal failed: {describe_error(error)}")
        return notes

    def _check(self, step: int, save: Save) -> None:
        """Check that the bucket has every object to which the metadata will refer."""
        there = self._bucket.folder(step)
        for name, stored in save.files.items():
            if name not in there or there[name]["size"] != stored.nbytes:
                has = f"has {there[name]['size']} bytes" if name in there else "is missing"
                raise ValueError(
                    f"{self._bucket.key(step, name)}: the object {has} (expected: {stored.nbytes} bytes); is another "
                    "training mirrored to the same prefix?"
                )

    def _commit(self, step: int, save: Save, there: Any) -> None:
        """Write the metadata, which commits the checkpoint.

        The metadata are read back, because the store may have written them although its answer was lost, or may have
        written other bytes.
        """
        bucket, failure = self._bucket, None
        if there is None or there[0] != save.metadata:
            try:
                bucket.write(
                    step, METADATA_NAME, save.metadata, "create" if there is None else there[1]
                )
            except FAILURES as error:
                failure = error  # raised below, unless the metadata are there
        found = bucket.read(step)
        if found is not None and found[0] == save.metadata:
            return
        if failure is not None:
            raise failure
        bucket.delete(step, [METADATA_NAME])
        raise ValueError(f"{bucket.key(step)}: it differs from what was uploaded")

    def _abandon(self, step: int, back_to: int) -> list[str]:
        """Set aside checkpoints that are newer than the restored step, except those mirrored since."""
        kept = {step, *self._mirrored_steps}
        newer = [each for each in self._bucket.steps() if each > back_to and each not in kept]
        left = [each for each in newer if not self._bucket.set_aside(each)]
        note = (
            f"steps {left} are newer than step {back_to}, which was restored, and restore() will prefer them: "
            "they cannot be set aside, because no mirror made them"
        )
        return [note] if left else []

    def _remove_superfluous(self, step: int, keep_last: int, damaged: list[int]) -> None:
        """Remove superfluous checkpoints, and those that were set aside."""

        def choose(ours: Iterable[int]) -> list[int]:
            return superfluous(ours, step, keep_last, self._keep_every, damaged)

        self._bucket.remove_superfluous(choose, lambda each: is_permanent(each, self._keep_every))


def send(
    step: int | None = None, number: int = 0, outcome: str = "", why: str = "", **more: Any
) -> None:
    """Send an outcome to the training, or, without an outcome, a sign of life."""
    line = {"step": step, "number": number, "outcome": outcome, "why": why, **more}
    with contextlib.suppress(BrokenPipeError):  # the training has ended
        # Begin with a newline: if something else has printed a part of a line, the message still begins a new one.
        sys.stdout.write(f"\n{MESSAGE.decode()}{json.dumps(line)}\n")
        sys.stdout.flush()


def main() -> None:
    """Run the jobs on standard input."""
    _lower_priority()
    settings = json.loads(sys.stdin.readline())
    store = pickle.loads(base64.b64decode(settings["store"]))
    uploader = Uploader(Bucket(store, settings["prefix"]), settings)

    def listen() -> None:
        with contextlib.suppress(ValueError):  # the training has ended in the middle of a line
            for line in sys.stdin:
                uploader.add_job(json.loads(line))
        end()

    def watch() -> None:  # needed because a forked child of the training may keep the pipe open
        try:
            select.select([os.pidfd_open(settings["process"])], [], [])
        except ProcessLookupError:  # the training has already ended
            pass
        except OSError:  # Linux before 5.3
            return
        end()

    def end() -> None:
        # This ends an upload by an exception, so that obstore also aborts it in the store.
        uploader.add_job(None)
        time.sleep(_END_SECONDS)
        os._exit(1)

    for each in (listen, watch, uploader.report_progress):
        threading.Thread(target=each, daemon=True).start()
    uploader.run()


def _lower_priority() -> None:
    """Lower this process's priority below the training's, also under a scheduler that groups by session (autogroup)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
