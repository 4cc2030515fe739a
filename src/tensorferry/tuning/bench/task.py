"""A process of a benchmark: its memory, its files, and one way or several to move bytes between them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.tuning.bench.memory import Memory
from tensorferry.tuning.bench.ways import Way, make_way
from tensorferry.tuning.scratch import make_cold, remove
from tensorferry.tuning.stopwatch import Stopwatch

if TYPE_CHECKING:
    from pathlib import Path

    from tensorferry.tuning.bench.arguments import Job, Operation

# Files of one process, by operation; loops go through them in turn.
Files = dict["Operation", list["Path"]]


@dataclass(frozen=True)
class Loop:
    """One transfer: when it began and ended (monotonic seconds), and what it cost."""

    started: float
    ended: float
    cpu_seconds: float
    peak_growth_nbytes: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


@dataclass(frozen=True)
class Summed:
    """What a way says of all its transfers: percentiles of blocks' latencies, and how bytes of a GPU went."""

    latency_microseconds: dict[str, float] | None = None
    gpu: dict[str, Any] | None = None


class Task:
    """A crew's member: its methods are called in the order in which they stand here."""

    def __init__(self, job: Job, number: int, files: Files) -> None:
        self._job = job
        self._files = files
        self._new_files = [
            path for paths in files.values() for path in dict.fromkeys(paths) if not path.exists()
        ]
        device = None
        if job.gpu:
            import torch

            gpu = torch.device("cuda", job.places[number].device)
            device = torch.empty(job.io_nbytes, dtype=torch.uint8, device=gpu)
        self._memory = Memory(job.io_nbytes, job.memory, device, job.slow_bounce_buffer)
        self._memory.fill(0)
        self._stamp = 0
        self._ways: dict[str, Way] = {}

    def begin(self, operation: Operation, ways: list[str]) -> list[str]:
        """Make the ways, and for reading the files. Return what the user should know of the memory."""
        if operation == "read":
            for path in dict.fromkeys(self._files[operation]):
                if not self._is_readable(path):
                    self._make_file(path)
        self._ways = {name: make_way(name, self._job, self._memory) for name in ways}
        return self._memory.notes

    def prepare(self, name: str, operation: Operation, loop: int) -> None:
        """Get file and memory ready for one transfer of any way, also of one that is not ours."""
        path = self._path(operation, loop)
        way = self._ways.get(name)
        if operation == "read":
            make_cold(path)
            if self._job.validate and way is not None:
                # What an earlier transfer has left there must not pass for what this one reads.
                self._memory.clear() if way.fills_memory else self._memory.fill(self._stamp)
        else:
            if self._job.makes_new_files:
                remove(path)
            if self._job.validate:
                self._stamp += 1
                self._memory.fill(self._stamp)
        if way is not None:
            way.prepare(operation, path)

    def transfer(self, name: str) -> Loop:
        """Do it, and tell what it took."""
        way = self._ways[name]
        with Stopwatch() as watch:
            way.transfer()
        return Loop(watch.started, watch.ended, watch.cpu_seconds, watch.peak_growth_nbytes)

    def check(self, name: str) -> None:
        """Compare file and memory."""
        self._ways[name].check()

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings that a way's last transfer went by."""
        return self._ways[name].settings()

    def end(self) -> dict[str, Summed]:
        """Close the ways, and return what each has to say of all its transfers."""
        summed = {
            name: Summed(way.latency_microseconds(), way.gpu()) for name, way in self._ways.items()
        }
        for way in self._ways.values():
            way.close()
        self._ways = {}
        return summed

    def orphaned(self) -> None:
        """Remove the new files: the process that would do that is gone."""
        for path in self._new_files:
            with contextlib.suppress(OSError):
                path.unlink()
            if not self._job.keep_files:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()

    def _path(self, operation: Operation, loop: int) -> Path:
        paths = self._files[operation]
        return paths[loop % len(paths)]

    def _is_readable(self, path: Path) -> bool:
        # What is there under ds_io's names was made by it or by us; torch.load needs a file that we saved.
        return (
            self._job.engine != "torch_io"
            and path.is_file()
            and path.stat().st_size == self._job.io_nbytes
        )

    def _make_file(self, path: Path) -> None:
        if self._job.engine == "torch_io":
            way = make_way("torch_io", self._job, self._memory)
            way.prepare("write", path)
            way.transfer()
        else:
            tensorferry.write(path, self._memory.content(), truncate=True)
