"""The separate process that mirrors one rank's files; it reads jobs and writes outcomes as lines of JSON.

It is not a thread of the training, but has its own interpreter, priority and process group. It ends when the training
ends: then its standard input ends, or :func:`main` sees that the training's process is gone. A job is one checkpoint to
mirror, as :mod:`tensorferry.checkpoint.mirror.mirror` sends it.

The processes of the ranks communicate only through records in the bucket
(:mod:`tensorferry.checkpoint.mirror.bucket`), which list the objects that a rank uploads. The first rank's process
decides which save is uploaded, and announces it by its record. It also commits the save when all ranks have uploaded
their files; the other processes follow.
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
    MANIFEST,
    SET_ASIDE,
    Bucket,
    describe_error,
    id_of,
    metadata_key,
    names_in,
    object_key,
    rank_of,
    rank_record,
)
from tensorferry.checkpoint.mirror.mirror import MESSAGE
from tensorferry.checkpoint.mirror.uploading import GoneError, Throttle, upload
from tensorferry.checkpoint.steps import is_permanent, name_of, superfluous
from tensorferry.checkpoint.storage.names import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The time for an upload to abort when the training has ended.
_END_SECONDS = 10.0
# The interval between two reads of other ranks' records: at first, and later. Each read costs a request.
_LOOK_SECONDS, _MAX_LOOK_SECONDS = 0.1, 5.0
# The interval at which the record of a running upload is rewritten, as a sign of life.
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
        self.id = id_of(self.metadata)
        self.names = names_in(self.metadata)


class Follower:
    """The work of a rank's process; the first rank's process has a :class:`Leader` instead."""

    def __init__(self, bucket: Bucket, settings: dict[str, Any]) -> None:
        self._bucket, self._settings = bucket, settings
        self._rank, self._patience = settings["rank"], settings["patience"]
        self._record = rank_record(self._rank)
        self._throttle = Throttle(settings["rate"], self._pause)
        self._jobs: list[dict[str, Any]] = []
        self._jobs_changed = threading.Condition()
        self._stopped = threading.Event()
        self._has_progressed = False
        # Rewrites the record of the running upload, as a sign of life; None if no upload is running.
        self._write_signs: Callable[[], object] | None = None
        # Held while the record is rewritten. When _stop_refreshing() has returned, the thread of report_progress() does
        # not write the record again, which may have been deleted since.
        self._signing = threading.Lock()

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
                self._do_next()

    def report_progress(self) -> None:
        """Report periodically that an upload progresses; runs in its own thread, while the main thread uploads."""
        while not self._stopped.wait(_SIGN_SECONDS):
            if self._has_progressed:
                self._has_progressed = False
                send()
                with contextlib.suppress(*FAILURES):
                    self._refresh_record()

    def _refresh_record(self) -> None:
        with self._signing:
            if self._write_signs is not None:
                self._write_signs()

    def _stop_refreshing(self) -> None:
        with self._signing:
            self._write_signs = None

    def _pause(self, seconds: float) -> None:
        self._has_progressed = True
        if self._stopped.wait(seconds):
            raise _StoppedError

    def _pauses(self) -> Iterator[None]:
        """Yield at growing intervals: at once, and then after ever longer pauses."""
        seconds = _LOOK_SECONDS
        while True:
            yield
            self._pause(seconds)
            seconds = min(2 * seconds, _MAX_LOOK_SECONDS)

    def _do_next(self) -> None:
        """Follow the first rank's upload, if it begins soon, and wait until it is committed or abandoned."""
        deadline = time.monotonic() + self._patience
        for _ in self._pauses():
            jobs = [*self._jobs]
            for job in reversed(jobs):
                # Ignore errors: the first rank gets the same errors, and reports them.
                with contextlib.suppress(*FAILURES):
                    found = self._bucket.records(f"/{name_of(job['step'])}")
                    for save, records in found.get(job["step"], {}).items():
                        if rank_record(0) in records and self._record not in records:
                            self._leave_to_first_rank(jobs[: jobs.index(job) + 1])
                            self._follow(job, save)
                            return
            if time.monotonic() > deadline:
                self._leave_to_first_rank(jobs)
                return

    def _leave_to_first_rank(self, jobs: list[dict[str, Any]]) -> None:
        with self._jobs_changed:
            self._jobs = [each for each in self._jobs if each not in jobs]
        for job in jobs:
            send(job["step"], job["number"], "left to the first rank")

    def _follow(self, job: dict[str, Any], save_id: str) -> None:
        step = job["step"]
        try:
            save = Save(Path(job["path"]))
            if save.id != save_id:
                raise GoneError(
                    f"the checkpoint {str(save.path)!r} was replaced by another save before this rank uploaded its "
                    "files"
                )
            self._upload(step, save)
        except _StoppedError:
            raise
        except Exception as error:
            self._stop_refreshing()
            why = describe_error(error)
            send(step, job["number"], "failed", why)
            with contextlib.suppress(*FAILURES):
                record = self._bucket.read_record(step, save_id, self._record)
                record |= {"state": "failed", "why": why}
                self._bucket.write_record(step, save_id, self._record, **record)
        for _ in self._pauses():
            with contextlib.suppress(*FAILURES):
                records = self._bucket.records_of(step, save_id)
                if self._record in records and rank_record(0) in records:
                    continue
                self._stop_refreshing()
                if self._record in records:  # the first rank has abandoned the save
                    self._bucket.abandon(step, save_id, self._rank)
                return

    def _upload(self, step: int, save: Save) -> dict[str, int]:
        """Upload this rank's files, and return their sizes; the state in its record is "begun", then "done"."""
        began = time.monotonic()
        names = [name for name in save.names if rank_of(name) == self._rank]
        own = {name: (save.path / name).stat().st_size for name in names}
        record: dict[str, Any] = {"objects": own, "state": "begun"}

        def signs() -> None:
            # Each record has another number, so other ranks see that it has been rewritten.
            record["seconds"] = time.monotonic() - began
            self._bucket.write_record(step, save.id, self._record, **record)

        self._write_signs = signs
        self._refresh_record()
        for name in names:
            key = object_key(step, name)
            own[name] = upload(self._bucket, save.path / name, key, self._throttle)
        record["state"] = "done"
        self._refresh_record()
        return own


class Leader(Follower):
    """The work of the first rank's process."""

    def __init__(self, bucket: Bucket, settings: dict[str, Any]) -> None:
        super().__init__(bucket, settings)
        self._keep_last, self._keep_every = settings["keep_last"], settings["keep_every"]
        self._alive = timedelta(seconds=settings["alive"])
        self._tidied = False  # whether all leftovers of dead processes have been removed
        self._current_save: tuple[int, str] | None = None
        # The "back_to" of the last job that had one: the step to which the training returned, and a number.
        self._last_back_to: Any = None
        # Steps mirrored since the last return to an older step.
        self._mirrored_steps: set[int] = set()

    def _do_next(self) -> None:
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
            self._stop_refreshing()
            send(job["step"], job["number"], outcome, describe_error(error))
            self._tidied = False
            with contextlib.suppress(*FAILURES):
                if self._current_save is not None:
                    self._bucket.abandon(*self._current_save, 0)
        else:
            more = {"notes": notes, "back_to": job["back_to"]}
            send(job["step"], job["number"], "mirrored", **more)

    def _mirror(self, job: dict[str, Any]) -> list[str]:
        """Upload and commit a save; return messages about problems that do not make the save fail."""
        bucket, step, back_to = self._bucket, job["step"], job["back_to"]
        self._current_save = None
        if back_to is not None and back_to != self._last_back_to:
            self._last_back_to, self._mirrored_steps = back_to, set()
        save = Save(Path(job["path"]))
        there = bucket.read(metadata_key(step))
        if there is not None and there[0] != save.metadata:
            owned = MANIFEST in bucket.records_of(step, id_of(there[0]))
            if not (owned and job["replace"]):
                remedy = (
                    " (remedies: continue from it by restore(), save with overwrite=True, or mirror to another prefix)"
                    if owned
                    else ", which no mirror made (remedy: mirror to another prefix)"
                )
                key = bucket.key(metadata_key(step))
                raise ValueError(f"{key}: there is another checkpoint of this step{remedy}")
        notes: list[str] = []
        # After a return to an older step, checkpoints of later steps must not be restored: they are set aside. But the
        # bucket must have a checkpoint at every moment. So set them aside before the upload only if the bucket also has
        # a checkpoint of the step returned to, or of an earlier one; otherwise after the commit.
        abandons_first = back_to is not None and any(each <= back_to[0] for each in bucket.steps())
        if abandons_first:
            notes += self._abandon(step, back_to[0])
        self._current_save = step, save.id
        objects = self._upload(step, save)
        if not self._tidied:
            self._tidy(step, save)
        objects |= self._objects_of_others(step, save)
        self._check(step, save, objects)
        bucket.write_record(step, save.id, MANIFEST, objects=objects)
        self._commit(step, save, there)
        self._stop_refreshing()
        self._mirrored_steps.add(step)
        try:
            bucket.tidy(step)
            if back_to is not None and not abandons_first:
                notes += self._abandon(step, back_to[0])
            if self._keep_last is not None:
                self._remove_superfluous(step, self._keep_last, job["damaged"])
        except FAILURES as error:
            self._tidied = False
            notes.append(f"a removal failed: {describe_error(error)}")
        return notes

    def _tidy(self, step: int, save: Save) -> None:
        """Remove leftovers of dead processes.

        The age of a record is measured by the store's clock: our own record has just been written, so its time is the
        current time of that clock.
        """
        records = self._bucket.records()
        alive_since = records[step][save.id][self._record][1] - self._alive
        settled = {MANIFEST, SET_ASIDE}
        self._tidied = True
        for each, saves in records.items():
            if any(set(names) - settled for names in saves.values()):
                self._tidied &= self._bucket.tidy(each, save.id, alive_since)

    def _objects_of_others(self, step: int, save: Save) -> dict[str, int]:
        """Wait until all other ranks have uploaded their files, and return the sizes of these files."""
        waiting = {rank_of(name) for name in save.names} - {0}
        objects: dict[str, int] = {}
        seen: dict[str, Any] = {}
        deadline = time.monotonic() + self._patience
        for _ in self._pauses():
            if not waiting:
                break
            records = self._bucket.records_of(step, save.id)
            for rank in sorted(waiting):
                name = rank_record(rank)
                if name not in records or records[name] == seen.get(name):
                    continue
                seen[name], deadline = records[name], time.monotonic() + self._patience
                record = self._bucket.read_record(step, save.id, name)
                if record.get("state") == "failed":
                    raise RuntimeError(f"rank {rank}: {record.get('why')}")
                if record.get("state") == "done":
                    objects |= record["objects"]
                    waiting.remove(rank)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {sorted(waiting)} have not updated their records for {self._patience:.0f} seconds"
                )
        return objects

    def _check(self, step: int, save: Save, objects: dict[str, int]) -> None:
        """Check that the bucket has every object to which the metadata will refer."""
        there = {key: meta["size"] for key, meta in self._bucket.objects(name_of(step))}
        for name in save.names:
            key = object_key(step, name)
            if name not in objects or there.get(key) != objects[name]:
                has = f"has {there[key]} bytes" if key in there else "is missing"
                expected = f"{objects[name]} bytes" if name in objects else "no rank uploaded it"
                raise ValueError(
                    f"{self._bucket.key(key)}: the object {has} (expected: {expected}); is another training mirrored "
                    "to the same prefix?"
                )

    def _commit(self, step: int, save: Save, there: Any) -> None:
        """Write the metadata, which commits the checkpoint.

        The metadata are read back, because the store may have written them although its answer was lost, or may have
        written other bytes.
        """
        key, failure = metadata_key(step), None
        if there is None or there[0] != save.metadata:
            try:
                self._bucket.write(key, save.metadata, "create" if there is None else there[1])
            except FAILURES as error:
                failure = error  # raised below, unless the metadata are there
        found = self._bucket.read(key)
        if found is not None and found[0] == save.metadata:
            return
        if failure is not None:
            raise failure
        self._bucket.delete([key])
        raise ValueError(f"{self._bucket.key(key)}: it differs from what was uploaded")

    def _abandon(self, step: int, back_to: int) -> list[str]:
        """Set aside checkpoints that are newer than the restored step, except those mirrored since."""
        kept = {step, *self._mirrored_steps}
        for each, save, is_aside in self._bucket.manifests():
            if each > back_to and each not in kept and not is_aside:
                self._bucket.set_aside(each, save)
        left = [each for each in self._bucket.steps() if each > back_to and each not in kept]
        note = (
            f"steps {left} are newer than step {back_to}, which was restored, and restore() will prefer them: "
            "they cannot be set aside, because no mirror made them"
        )
        return [note] if left else []

    def _remove_superfluous(self, step: int, keep_last: int, damaged: list[int]) -> None:
        """Remove superfluous checkpoints that mirrors made, and those that were set aside."""
        manifests = [*self._bucket.manifests()]
        counting = {each: save for each, save, is_aside in manifests if not is_aside}
        for each in superfluous(counting, step, keep_last, self._keep_every, damaged):
            self._bucket.remove(each, counting[each])
        for each, save, is_aside in manifests:
            if is_aside and not is_permanent(each, self._keep_every):
                self._bucket.remove(each, save)


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
    kind = Follower if settings["rank"] else Leader
    follower = kind(Bucket(store, settings["prefix"]), settings)

    def listen() -> None:
        with contextlib.suppress(ValueError):  # the training has ended in the middle of a line
            for line in sys.stdin:
                follower.add_job(json.loads(line))
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
        follower.add_job(None)
        time.sleep(_END_SECONDS)
        os._exit(1)

    for each in (listen, watch, follower.report_progress):
        threading.Thread(target=each, daemon=True).start()
    follower.run()


def _lower_priority() -> None:
    """Lower this process's priority below the training's, also under a scheduler that groups by session (autogroup)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
