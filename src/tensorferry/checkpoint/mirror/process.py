"""The process that mirrors one rank's files: jobs come as lines of JSON, outcomes go back so.

It is no thread of the training: it has an interpreter, a priority and a process group of its own, and ends with the
training, however that ends: its standard input does. The first rank says what is uploaded, by its record, and commits;
the others follow it. They speak by records in the bucket alone (:mod:`tensorferry.checkpoint.mirror.bucket`).
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

from tensorferry.base.file_locks import read_directory
from tensorferry.checkpoint.mirror.bucket import (
    FAILURES,
    MANIFEST,
    SET_ASIDE,
    Bucket,
    id_of,
    metadata_key,
    names_in,
    rank_of,
    rank_record,
    said,
)
from tensorferry.checkpoint.mirror.uploading import GoneError, Throttle, upload
from tensorferry.checkpoint.steps import name_of, stays, superfluous
from tensorferry.checkpoint.storage.names import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long what is on its way may take to be given up when the training has ended.
_END_SECONDS = 10.0
# Between two looks at what other ranks say: at first, and later. Each costs a request.
_LOOK_SECONDS, _MAX_LOOK_SECONDS = 0.1, 5.0
_SIGN_SECONDS = 30.0


class _StoppedError(Exception):
    """The training has ended."""


class Save:
    """A local checkpoint that nobody removes meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.let_go = read_directory(self, path, METADATA_NAME)
            self.metadata = (path / METADATA_NAME).read_bytes()
        except FileNotFoundError as error:
            raise GoneError(f"{str(path)!r} has gone: newer ones were saved meanwhile") from error
        self.id = id_of(self.metadata)
        self.names = names_in(self.metadata)


class Follower:
    """What the process of a rank does; that of the first one is a :class:`Leader`."""

    def __init__(self, bucket: Bucket, rank: int, rate: int | None, patience: float) -> None:
        self._bucket, self._rank, self._patience = bucket, rank, patience
        self._record = rank_record(rank)
        self._throttle = Throttle(rate, self._pause)
        self._jobs: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._moved = False
        self._signs: Callable[[], object] | None = None
        self._signing = threading.Lock()

    def take(self, job: dict[str, Any] | None) -> None:
        """Take a job, or None: there will be no more."""
        with self._news:
            if job is None:
                self._stopped.set()
            else:
                self._jobs.append(job)
            self._news.notify()

    def run(self) -> None:
        """Do jobs until the training ends."""
        with contextlib.suppress(_StoppedError):
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._jobs or self._stopped.is_set())
                self._pause(0)
                self._do_next()

    def give_signs(self) -> None:
        """Show again and again that what is on its way moves: not from within obstore, which this needs, too."""
        while not self._stopped.wait(_SIGN_SECONDS):
            if self._moved:
                self._moved = False
                tell()
                with contextlib.suppress(*FAILURES):
                    self._sign()

    def _sign(self) -> None:
        with self._signing:
            if self._signs is not None:
                self._signs()

    def _end_signs(self) -> None:
        with self._signing:
            self._signs = None

    def _pause(self, seconds: float) -> None:
        self._moved = True
        if self._stopped.wait(seconds):
            raise _StoppedError

    def _pauses(self) -> Iterator[None]:
        """Yield again and again, ever later."""
        seconds = _LOOK_SECONDS
        while True:
            yield
            self._pause(seconds)
            seconds = min(2 * seconds, _MAX_LOOK_SECONDS)

    def _do_next(self) -> None:
        """Upload what the first rank uploads, if that is soon, and wait until it is committed, or given up."""
        deadline = time.monotonic() + self._patience
        for _ in self._pauses():
            jobs = [*self._jobs]
            for job in reversed(jobs):
                with contextlib.suppress(*FAILURES):  # the first rank meets the same, and says so
                    found = self._bucket.records(f"/{name_of(job['step'])}")
                    for save, records in found.get(job["step"], {}).items():
                        if rank_record(0) in records and self._record not in records:
                            self._drop(jobs[: jobs.index(job) + 1])
                            self._follow(job, save)
                            return
            if time.monotonic() > deadline:
                self._drop(jobs)
                return

    def _drop(self, jobs: list[dict[str, Any]]) -> None:
        with self._news:
            self._jobs = [each for each in self._jobs if each not in jobs]
        for job in jobs:
            tell(job["step"], job["number"], "left to the first rank")

    def _follow(self, job: dict[str, Any], save_id: str) -> None:
        step = job["step"]
        try:
            save = Save(Path(job["path"]))
            if save.id != save_id:
                raise GoneError(f"{str(save.path)!r} has been saved anew")
            self._upload(step, save)
        except _StoppedError:
            raise
        except Exception as error:
            self._end_signs()
            tell(step, job["number"], "failed", said(error))
            with contextlib.suppress(*FAILURES):
                objects = self._bucket.read_record(step, save_id, self._record)["objects"]
                why = {"state": "failed", "why": said(error)}
                self._bucket.write_record(step, save_id, self._record, objects=objects, **why)
        for _ in self._pauses():
            with contextlib.suppress(*FAILURES):
                records = self._bucket.records_of(step, save_id)
                if self._record in records and rank_record(0) in records:
                    continue
                self._end_signs()
                if self._record in records:  # it was given up
                    self._bucket.give_up(step, save_id, self._rank)
                return

    def _upload(self, step: int, save: Save) -> dict[str, int]:
        """Upload this rank's files, and return them; its record says before, meanwhile and afterwards that it does."""
        began = time.monotonic()
        names = [name for name in save.names if rank_of(name) == self._rank]
        own = {name: (save.path / name).stat().st_size for name in names}
        told: dict[str, Any] = {"objects": own, "state": "begun"}

        def signs() -> None:
            seconds = time.monotonic() - began  # so that it is another record each time
            self._bucket.write_record(step, save.id, self._record, **told, seconds=seconds)

        self._signs = signs
        self._sign()
        for name in names:
            key = f"{name_of(step)}/{name}"
            own[name] = upload(self._bucket, save.path / name, key, self._throttle)
        told["state"] = "done"
        self._sign()
        return own


class Leader(Follower):
    """What the process of the first rank does."""

    def __init__(
        self, *given: Any, keep_last: int | None, keep_every: int | None, alive: float
    ) -> None:
        super().__init__(*given)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._alive = timedelta(seconds=alive)
        self._tidied = False
        self._begun: tuple[int, str] | None = None
        self._gone_back: Any = None
        self._mine: set[int] = set()  # the steps that have been mirrored since

    def _do_next(self) -> None:
        """Mirror the newest save; those before it are too late."""
        with self._news:
            *late, job = self._jobs
            self._jobs = []
        for each in late:
            why = f"the save of step {job['step']} came before its upload began"
            tell(each["step"], each["number"], "skipped", why)
        try:
            notes = self._mirror(job)
        except _StoppedError:
            raise
        except Exception as error:
            outcome = "skipped" if isinstance(error, GoneError) else "failed"
            self._end_signs()
            tell(job["step"], job["number"], outcome, said(error))
            self._tidied = False
            with contextlib.suppress(*FAILURES):
                if self._begun is not None:
                    self._bucket.give_up(*self._begun, 0)
        else:
            told = {"notes": notes, "back_to": job["back_to"]}
            tell(job["step"], job["number"], "mirrored", **told)

    def _mirror(self, job: dict[str, Any]) -> list[str]:
        """Upload and commit a save, and return what could not be done besides."""
        bucket, step, back_to = self._bucket, job["step"], job["back_to"]
        self._begun = None
        if back_to is not None and back_to != self._gone_back:
            self._gone_back, self._mine = back_to, set()
        save = Save(Path(job["path"]))
        there = bucket.read(metadata_key(step))
        if there is not None and there[0] != save.metadata:
            owned = MANIFEST in bucket.records_of(step, id_of(there[0]))
            if not (owned and job["replace"]):
                whose = "" if owned else ", which no mirror made"
                raise ValueError(
                    f"{bucket.key(metadata_key(step))}: there is another checkpoint of this step{whose}; restore() "
                    "from the mirror, save with overwrite=True, or mirror to another prefix"
                )
        notes: list[str] = []
        # What was gone back from must not be restored, but something must be there at every moment.
        abandons_first = back_to is not None and any(each <= back_to[0] for each in bucket.steps())
        if abandons_first:
            notes += self._abandon(step, back_to[0])
        self._begun = step, save.id
        objects = self._upload(step, save)
        if not self._tidied:
            self._tidy(step, save)
        objects |= self._objects_of_others(step, save)
        self._check(step, save, objects)
        bucket.write_record(step, save.id, MANIFEST, objects=objects)
        self._commit(step, save, there)
        self._end_signs()
        self._mine.add(step)
        try:
            bucket.tidy(step)
            if back_to is not None and not abandons_first:
                notes += self._abandon(step, back_to[0])
            if self._keep_last is not None:
                self._thin_out(step, self._keep_last, job["damaged"])
        except FAILURES as error:
            self._tidied = False
            notes.append(f"not all could be removed: {said(error)}")
        return notes

    def _tidy(self, step: int, save: Save) -> None:
        """Remove what dead processes have left; the time is the store's, which it has just put to our record."""
        records = self._bucket.records()
        alive_since = records[step][save.id][self._record][1] - self._alive
        settled = {MANIFEST, SET_ASIDE}
        self._tidied = True
        for each, saves in records.items():
            if any(set(names) - settled for names in saves.values()):
                self._tidied &= self._bucket.tidy(each, save.id, alive_since)

    def _objects_of_others(self, step: int, save: Save) -> dict[str, int]:
        """Wait until all other ranks have uploaded their files, and return these."""
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
                    f"ranks {sorted(waiting)} have given no sign of life for {self._patience:.0f} seconds"
                )
        return objects

    def _check(self, step: int, save: Save, objects: dict[str, int]) -> None:
        """Check that everything is there, in the bucket, that metadata is about to name."""
        there = {key: meta["size"] for key, meta in self._bucket.objects(name_of(step))}
        for name in save.names:
            key = f"{name_of(step)}/{name}"
            if name not in objects or there.get(key) != objects[name]:
                raise ValueError(
                    f"{self._bucket.key(key)}: it has {there.get(key)} bytes, not {objects.get(name)}; is another "
                    "training mirrored to the same prefix?"
                )

    def _commit(self, step: int, save: Save, there: Any) -> None:
        """Let the checkpoint count; what the answer is worth is told by what lies there then."""
        key, failure = metadata_key(step), None
        if there is None or there[0] != save.metadata:
            try:
                self._bucket.write(key, save.metadata, "create" if there is None else there[1])
            except FAILURES as error:
                failure = error  # it may have been done, and the answer lost
        found = self._bucket.read(key)
        if found is not None and found[0] == save.metadata:
            return
        if failure is not None:
            raise failure
        self._bucket.delete([key])
        raise ValueError(f"{self._bucket.key(key)}: it is not what was uploaded")

    def _abandon(self, step: int, back_to: int) -> list[str]:
        """Set aside what is newer than the step that was restored, but for what has been mirrored since."""
        kept = {step, *self._mine}
        for each, save, is_aside in self._bucket.manifests():
            if each > back_to and each not in kept and not is_aside:
                self._bucket.set_aside(each, save)
        if left := [each for each in self._bucket.steps() if each > back_to and each not in kept]:
            return [
                f"steps {left} are newer than step {back_to}, which was restored, and restore() will prefer them: no "
                "mirror made them"
            ]
        return []

    def _thin_out(self, step: int, keep_last: int, damaged: list[int]) -> None:
        """Remove older checkpoints that mirrors made, and those that were set aside."""
        manifests = [*self._bucket.manifests()]
        counting = {each: save for each, save, is_aside in manifests if not is_aside}
        for each in superfluous(counting, step, keep_last, self._keep_every, damaged):
            self._bucket.remove(each, counting[each])
        for each, save, is_aside in manifests:
            if is_aside and not stays(each, self._keep_every):
                self._bucket.remove(each, save)


def tell(
    step: int | None = None, number: int = 0, outcome: str = "", why: str = "", **more: Any
) -> None:
    """Tell the training an outcome; without one, that this process lives."""
    line = {"step": step, "number": number, "outcome": outcome, "why": why, **more}
    with contextlib.suppress(BrokenPipeError):  # it has ended
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Do what standard input says."""
    _stay_behind()
    given = json.loads(sys.stdin.readline())
    store = pickle.loads(base64.b64decode(given["store"]))
    common = (Bucket(store, given["prefix"]), given["rank"], given["rate"], given["patience"])
    follower = Follower(*common)
    if given["rank"] == 0:
        more = {name: given[name] for name in ("keep_last", "keep_every", "alive")}
        follower = Leader(*common, **more)

    def listen() -> None:
        for line in sys.stdin:
            follower.take(json.loads(line))
        end()

    def watch() -> None:  # a child that the training forked may keep the pipe
        try:
            select.select([os.pidfd_open(given["process"])], [], [])
        except ProcessLookupError:  # it has ended already
            pass
        except OSError:  # Linux before 5.3
            return
        end()

    def end() -> None:
        follower.take(None)  # uploads in parts are given up in order
        time.sleep(_END_SECONDS)
        os._exit(1)

    for each in (listen, watch, follower.give_signs):
        threading.Thread(target=each, daemon=True).start()
    follower.run()


def _stay_behind() -> None:
    """Leave the processors to the training, also where the scheduler gives each session its share."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
