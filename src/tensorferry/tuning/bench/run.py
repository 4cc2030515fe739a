"""Doing a job: the crew of processes, their files, and the loops, in which all ways take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorferry.base.checks import format_nbytes
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import fio
from tensorferry.tuning.bench.results import ProcessResult, Result, Results
from tensorferry.tuning.bench.task import Files, Loop, Summed, Task
from tensorferry.tuning.crew import Crew, CrewError, ending_signals_blocked
from tensorferry.tuning.machine.limits import available_nbytes
from tensorferry.tuning.machine.probe import attempt
from tensorferry.tuning.machine.storage import file_system
from tensorferry.tuning.scratch import remove, scratch_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.tuning.bench.arguments import Job, Operation

_PYTHON, _FIO = "python", "fio"
_SECTOR_NBYTES = 4096


class BenchError(Exception):
    """The machine could not do the job; the message says why and what helps. Nothing is left behind."""


# Told what is being done, and how many of how many transfers have been made.
Progress: TypeAlias = "Callable[[str, int, int], None]"


def run(job: Job, progress: Progress | None = None) -> Results:
    """Do a job and return what was measured. Its processes and files are gone afterwards, whatever happens.

    Raises
    ------
    BenchError
        A folder is not writable, the disk is full, memory is short, a process was killed, a file is not what was
        written, ...
    """
    try:
        return _Run(job, progress).results()
    except (CrewError, OSError) as error:
        raise BenchError(str(error)) from error


@dataclass
class _Taken:
    """What a contender's turns gave: loops in their order, and in each, as elsewhere, one entry for each process."""

    loops: list[list[Loop]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    summed: list[Summed] = field(default_factory=list)


class _Run:
    def __init__(self, job: Job, progress: Progress | None) -> None:
        self._job = job
        self._progress = progress
        self._notes = list(job.notes)
        # Ours comes first: fio gets its settings.
        self._ways = [job.way] + ([_PYTHON] if job.compare else [])
        self._contenders = list(self._ways)
        if job.compare:
            reason = self._why_no_fio()
            if reason:
                self._notes.append(f"not compared with fio: {reason}")
            else:
                self._contenders.append(_FIO)

    def results(self) -> Results:
        job = self._job
        _check_memory(job)
        for folder in dict.fromkeys(place.folder for place in job.places):
            if attempt(file_system, folder).get("in_memory"):
                self._notes.append(f"{folder} lies in memory: no read is cold there")
        with _places_for_files(job) as files:
            _check_space(job, files)
            members = [(job, number, files[number]) for number in range(len(files))]
            self._tell("starting processes", 0)
            with Crew(Task, members) as crew:
                results = [
                    result
                    for number, operation in enumerate(job.operations)
                    for result in self._operation(crew, operation, number, files)
                ]
        return Results(job, results, list(dict.fromkeys(self._notes)))

    def _operation(
        self, crew: Crew, operation: Operation, number: int, files: list[Files]
    ) -> list[Result]:
        job = self._job
        done = number * job.total_loops * len(self._contenders)
        self._tell(f"{operation}: preparing", done)
        for notes in crew.call("begin", operation, self._ways):
            self._notes += notes
        taken = {name: _Taken() for name in self._contenders}
        for loop in range(job.total_loops):
            warm = loop - job.warmup_loops
            words = "warm-up" if warm < 0 else f"loop {warm + 1}"
            for name in list(taken):
                self._tell(f"{operation} {name}, {words}", done)
                crew.call("prepare", name, operation, loop)
                if name != _FIO:
                    taken[name].loops.append(crew.call("transfer", name))
                    taken[name].settings = crew.call("settings", name)
                    if job.validate:
                        crew.call("check", name)
                elif (failure := self._take_fio(operation, taken, files, loop)) is not None:
                    self._notes.append(f"not compared with fio: {failure}")
                    self._contenders.remove(_FIO)
                    del taken[_FIO]
                done += 1
        for name, summed in _by_name(crew.call("end")).items():
            taken[name].summed = summed
        if not job.keep_files:
            for path in {path for each in files for path in each[operation]}:
                remove(path)
        return [self._result(operation, name, turns) for name, turns in taken.items()]

    def _take_fio(
        self, operation: Operation, taken: dict[str, _Taken], files: list[Files], loop: int
    ) -> str | None:
        """Let fio take its turn; return why it cannot."""
        turns = taken[_FIO]
        if not turns.settings:
            settings = self._fio_settings(taken[self._job.way].settings[0])
            turns.settings = [dataclasses.asdict(settings)] * len(files)
        try:
            jobs = fio.run(
                [each[operation][loop % len(each[operation])] for each in files],
                operation,
                self._fio_nbytes(),
                fio.Settings(**turns.settings[0]).arguments(),
            )
        except fio.FioError as error:
            return str(error)
        measured = [fio.measured(job, operation) for job in jobs]
        turns.loops.append([Loop(0.0, each.seconds, each.cpu_seconds) for each in measured])
        turns.summed = [Summed(each.latency_microseconds) for each in measured]
        return None

    def _result(self, operation: Operation, name: str, turns: _Taken) -> Result:
        job = self._job
        counted = 0 if job.include_warmup_time else job.warmup_loops
        processes = [
            ProcessResult(
                process=number,
                folder=str(place.folder),
                settings=turns.settings[number],
                nbytes=self._fio_nbytes() if name == _FIO else job.io_nbytes,
                loops=[loops[number] for loops in turns.loops[counted:]],
                latency_microseconds=turns.summed[number].latency_microseconds,
                gpu=turns.summed[number].gpu,
            )
            for number, place in enumerate(job.places)
        ]
        return Result(operation, name, processes)

    def _tell(self, description: str, done: int) -> None:
        job = self._job
        total = len(job.operations) * job.total_loops * len(self._contenders)
        if self._progress is not None:
            self._progress(description, done, total)

    def _fio_settings(self, settings: dict[str, Any]) -> fio.Settings:
        """Return ours: the same blocks, as many in flight, the same engine, memory as good as can be had."""
        used = dataclasses.asdict(Settings()) | settings
        engine = used["engine"] if used["engine"] in ("io_uring", "libaio") else "libaio"
        plain = fio.Settings(
            engine,
            min(used["block_size"], self._fio_nbytes()),
            used["queue_depth"] * used["intra_op_parallelism"],
        )
        nbytes = plain.memory_nbytes * len(self._job.places)
        return dataclasses.replace(
            plain,
            registered=engine == "io_uring" and fio.may_register(nbytes),
            huge_pages=fio.free_huge_pages_nbytes() >= nbytes + len(self._job.places) * (2 << 20),
        )

    def _fio_nbytes(self) -> int:
        return self._job.io_nbytes // _SECTOR_NBYTES * _SECTOR_NBYTES

    def _why_no_fio(self) -> str | None:
        if not fio.installed():
            return "it is not installed (apt install fio)"
        if self._fio_nbytes() == 0:
            return f"it moves no less than {_SECTOR_NBYTES} bytes past the page cache"
        return None


def _by_name(answers: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [answer[name] for answer in answers] for name in answers[0]}


@contextlib.contextmanager
def _places_for_files(job: Job) -> Iterator[list[Files]]:
    """Give each process's files by operation, and remove the new ones: always, or where they are kept, on failure."""
    with contextlib.ExitStack() as stack:
        folders = {place.folder: place.folder for place in job.places}
        if not job.keep_files:
            for folder in folders:
                scratch = scratch_directory(folder, "tensorferry-bench-")
                folders[folder] = stack.enter_context(scratch)
        files = [
            {
                operation: [folders[place.folder] / name for name in _names(job, operation, number)]
                for operation in job.operations
            }
            for number, place in enumerate(job.places)
        ]
        new = {path for each in files for some in each.values() for path in some}
        new = {path for path in new if not path.exists()}
        try:
            yield files
        except BaseException:
            with ending_signals_blocked():
                for path in new:
                    path.unlink(missing_ok=True)
            raise


def _names(job: Job, operation: Operation, number: int) -> list[str]:
    """Return the names that ds_io gives its files."""
    numbered = job.engine in ("aio_handle", "files") or job.different_file_each_iteration
    endings = [f"_{loop}" for loop in range(job.files_per_process)] if numbered else [""]
    return [f"_aio_{operation}_{job.io_nbytes}.pt.{number}{ending}" for ending in endings]


def _check_space(job: Job, files: list[Files]) -> None:
    """Refuse what cannot fit, before the first byte; quotas and others who write are noticed later."""
    needed: dict[int, int] = defaultdict(int)
    folders = {place.folder.stat().st_dev: place.folder for place in job.places}
    for place, each in zip(job.places, files, strict=True):
        # One operation's files are gone before the next one's are made, unless they are kept.
        counts = [sum(not path.exists() for path in dict.fromkeys(each[o])) for o in job.operations]
        count = sum(counts) if job.keep_files else max(counts)
        needed[place.folder.stat().st_dev] += count * job.io_nbytes
    for device, nbytes in needed.items():
        free = shutil.disk_usage(folders[device]).free
        if nbytes > free:
            raise BenchError(
                f"{folders[device]}: needs {_rounded(nbytes)}, but only {_rounded(free)} are free; "
                "free some, or use a smaller --io-size"
            )


def _check_memory(job: Job) -> None:
    available = available_nbytes()
    count = 2 if job.engine == "torch_io" else 1  # torch.load makes a tensor of its own
    if job.gpu:  # torch and plain Python go by way of host memory
        count = int(job.memory != "gpu" or count == 2 or job.compare)
    each = count * job.io_nbytes
    needed = each * len(job.places)
    if needed > available:
        raise BenchError(
            f"needs {_rounded(needed)} of memory ({len(job.places)} x {format_nbytes(each)}), but only "
            f"{_rounded(available)} are available; use a smaller --io-size or fewer processes"
        )


def _rounded(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
