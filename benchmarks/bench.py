"""The environment of a scenario: its directory, its worker processes, its comparisons, and the figures it promises.

A scenario is a function that receives a :class:`Bench`. The decorator :func:`scenario` turns it into a function that
receives :class:`Settings` and returns an :class:`Outcome`, which is the form that ``SCENARIOS`` needs. The measuring
itself is in ``tensorferry.tuning``; `tensorferry bench` uses the same code. A *comparison* measures several
*contenders*, which are ways to do the same work. In each *round*, every contender is measured once. The kind of a
contender is "ours" for tensorferry, "fio", "peer" for another library or program, or "limit" for work that is known to
be faster, such as the same step in memory.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks import drives
from tensorferry.tuning import fio
from tensorferry.tuning.rounds import (
    Comparison,
    Contender,
    Estimate,
    Sample,
    take_turns,
    throughput,
)
from tensorferry.tuning.scratch import make_cold, remove, scratch_directory
from tensorferry.tuning.workers import Worker, closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    Measure = Callable[[int], Sample]
    Prepare = Callable[[Path], None]

MIB, GIB = 1 << 20, 1 << 30
# Idle threads of torch's OpenMP pool spin for a while after each operation, which would count as CPU time of the next
# contender: hence one thread. DS_BUILD_OPS=0 keeps DeepSpeed from compiling all its ops.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}

Config = fio.Config
LARGE = [  # fio's configurations for comparisons with a large transfer
    Config("io_uring", MIB, 32),
    Config("io_uring", MIB, 128),
    Config("io_uring", MIB, 32, registered=True),
    Config("io_uring", MIB, 128, registered=True),
    Config("io_uring", MIB // 4, 128, registered=True),
    Config("io_uring", 4 * MIB, 32, registered=True),
    Config("libaio", MIB, 32),
    Config("libaio", MIB, 128),
    Config("io_uring", MIB, 32, huge_pages=True),
    Config("io_uring", MIB, 128, huge_pages=True),
    Config("io_uring", MIB, 8, registered=True, huge_pages=True),
    Config("io_uring", MIB, 32, registered=True, huge_pages=True),
    Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
    Config("libaio", MIB, 32, huge_pages=True),
]
# The best of these, for comparisons that take longer.
FEW = [
    Config("io_uring", MIB, 32),
    Config("io_uring", MIB, 128),
    Config("libaio", MIB, 128),
    Config("libaio", MIB, 32, huge_pages=True),
    Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]


@dataclass(frozen=True)
class Settings:
    """The options of a run, from the command line.

    ``told`` receives the progress (see ``tensorferry.tuning.rounds.take_turns``), and ``finished`` receives each
    comparison when it is complete.
    """

    directory: Path
    rounds: int = 7
    nbytes: int = GIB
    parameters: int = 300_000_000
    huge_pages: bool = True
    deepspeed: bool = True
    told: Callable[[str, int, int], None] = lambda *_: None
    finished: Callable[[Comparison], None] = lambda _: None

    @property
    def smoke(self) -> bool:
        """Whether sizes are too small for meaningful figures, as in the tests."""
        return self.nbytes < 64 * MIB


@dataclass
class Figure:
    """A figure with the target that a scenario promises to meet, and the measured value."""

    what: str
    relation: Literal[">=", "<="]
    target: float
    measured: float | None
    unit: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the measured median meets the target: "met", "missed" or "not measured"."""
        if self.measured is None:
            return "not measured"
        kept = (
            self.measured >= self.target if self.relation == ">=" else self.measured <= self.target
        )
        return "met" if kept else "missed"

    def as_dict(self) -> dict[str, Any]:
        """Return the figure, ready for JSON."""
        found = self.measured
        reach = [found.low, found.high] if isinstance(found, Estimate) else None
        return vars(self) | {"range": reach, "verdict": self.verdict}


@dataclass
class Outcome:
    """The results of a scenario."""

    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """The environment of a scenario, and the outcome that the scenario fills."""

    settings: Settings
    directory: Path
    outcome: Outcome
    workers: list[Worker]

    @property
    def nbytes(self) -> int:
        """The size of the large tensor."""
        return self.settings.nbytes

    @property
    def smoke(self) -> bool:
        return self.settings.smoke

    def worker(self, peer: type | str, **named: Any) -> Worker:
        """Return a worker process that holds an object of a class, given as the class or as "module:Class"."""
        target = peer if isinstance(peer, str) else f"{peer.__module__}:{peer.__name__}"
        self.workers.append(Worker(target, environment=ENVIRONMENT, **named))
        return self.workers[-1]

    def compare(
        self,
        name: str,
        rules: str,
        *,
        ours: Mapping[str, Measure] | None = None,
        peer: Mapping[str, Measure] | None = None,
        limit: Mapping[str, Measure] | None = None,
        more: Sequence[Contender] = (),
        unit: str = "GB/s",
        rounds: int | None = None,
    ) -> Comparison:
        """Measure contenders in rounds, and add the comparison to the outcome.

        ``ours``, ``peer`` and ``limit`` map the labels of contenders of that kind to the functions that measure them;
        ``more`` has contenders of any kind.
        """
        contenders = [*contenders_of("ours", ours), *contenders_of("peer", peer)]
        contenders += [*contenders_of("limit", limit), *more]
        comparison = Comparison(name, rules, unit)
        take_turns(comparison, contenders, rounds or self.settings.rounds, self.settings.told)
        self.outcome.comparisons.append(comparison)
        self.settings.finished(comparison)
        return comparison

    def fio(
        self,
        configs: Sequence[Config],
        path: Path,
        kind: str,
        nbytes: int,
        prepare: Prepare = make_cold,
        options: Sequence[str] = (),
    ) -> list[Contender]:
        """Return contenders in which fio reads a file, or writes a fresh one.

        ``prepare`` is applied to the file before each read. The written file is removed after each measurement.
        """

        def measure(config: Config) -> Sample:
            (remove if kind == "write" else prepare)(path)
            job = fio.run([path], kind, nbytes, [*config.arguments(), *options])[0]
            if kind == "write":
                remove(path)
            return fio.sample(job, kind)

        return self.each_fio(configs, lambda config, _: measure(config))

    def synced_fio(self, configs: Sequence[Config], nbytes: int) -> list[Contender]:
        """Return contenders in which fio writes fresh files, in full blocks of 4 MiB, with an fsync at the end."""
        whole = nbytes - nbytes % (4 * MIB)
        return self.fio(
            configs, self.directory / "target", "write", whole, options=("--end_fsync=1",)
        )

    def each_fio(
        self, configs: Sequence[Config], measure: Callable[[Config, int], Sample]
    ) -> list[Contender]:
        """Return a contender for each configuration that this machine can run.

        ``measure`` receives the configuration and the round's number.
        """
        return [
            Contender(c.label, "fio", lambda number, c=c: measure(c, number), c.tags)  # type: ignore[misc]
            for c in self.usable(configs)
        ]

    def usable(self, configs: Sequence[Config]) -> list[Config]:
        """Return the configurations that this machine can run: those with huge pages need enough free ones."""
        if not fio.installed():
            return []
        if self.smoke:
            return list(configs[:1])
        free = fio.free_huge_pages_nbytes() if self.settings.huge_pages else 0
        return [c for c in configs if not c.huge_pages or c.memory_nbytes <= free]

    def rounds_at_most(self, most: int) -> int:
        """Return the number of rounds for a comparison that takes long or varies little."""
        return min(most, self.settings.rounds)

    def note(self, text: str) -> None:
        """Add a note to the outcome, unless it is there already."""
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def at_least(
        self, what: str, target: float, measured: float | None, note: str = "", unit: str = ""
    ) -> None:
        """Add a figure to the outcome: the measured value must be at least the target."""
        self.outcome.figures.append(Figure(what, ">=", target, measured, unit, note))

    def at_most(
        self, what: str, target: float, measured: float | None, note: str = "", unit: str = ""
    ) -> None:
        """Add a figure to the outcome: the measured value must be at most the target."""
        self.outcome.figures.append(Figure(what, "<=", target, measured, unit, note))

    def over_fio(self, what: str, target: float, comparison: Comparison, label: str) -> None:
        """Add a figure to the outcome: the speed of a contender as a fraction of that of fio's best configuration."""
        best = comparison.best("fio")
        if best is None:
            self.note("fio is not installed, so the figures that compare with it are missing")
        note, small = comparison.describe(best), comparison.best("fio", "small")
        if small is not best:
            note += f"; {comparison.describe(small, 'with 4 KiB pages')}"
        self.at_least(what, target, comparison.over(label, best), note)

    def peak(self, what: str, limit_nbytes: float, comparison: Comparison, label: str) -> None:
        """Add a figure to the outcome: the growth of a contender's peak memory must not exceed a limit."""
        row = comparison.row(label)
        peak = row.peak_growth_nbytes if row else None
        self.at_most(what, limit_nbytes / MIB, None if peak is None else peak / MIB, unit="MiB")

    def deepspeed_wanted(self) -> bool:
        """Return whether the settings include DeepSpeed; add a note if they exclude it."""
        if not self.settings.deepspeed:
            self.note("DeepSpeed is left out: --no-deepspeed was given")
        return self.settings.deepspeed

    def leave_out(self, comparison: Comparison, label: str, missing: str) -> None:
        """Replace the row of a contender that failed by a note, if its failure names an optional component.

        ``missing`` is the text that identifies the component in the failure.
        """
        for row in [
            r for r in comparison.rows if r.label == label and missing in (r.failure or "")
        ]:
            comparison.rows.remove(row)
            self.note(f"{label}: {row.failure}")

    @contextlib.contextmanager
    def on_drive(self, nbytes: int) -> Iterator[Bench]:
        """Yield a copy of this bench on a drive over memory (root only)."""
        with drives.loop_mounted(nbytes) as mounted, closing([]) as workers:
            yield replace(self, directory=mounted, workers=workers)


def contenders_of(kind: Any, ways: Mapping[str, Measure] | None, *tags: str) -> list[Contender]:
    """Return contenders of one kind from a mapping of labels to the functions that measure."""
    return [Contender(label, kind, measure, tags) for label, measure in (ways or {}).items()]


def measured(
    worker: Worker,
    call: str,
    prepare: Prepare | None = None,
    paths: Sequence[Path] = (),
    /,
    *,
    clean: bool = False,
    **arguments: Any,
) -> Measure:
    """Return a function that measures by one call of a worker's method.

    ``prepare`` is applied to each of the paths before the call, and with ``clean`` also after it. ``arguments`` are
    those of the method. An argument that is a function is called with the round's number, and its result is passed.
    """

    def prepare_all() -> None:
        for path in paths if prepare else ():
            prepare(path)  # type: ignore[misc]

    def measure(number: int) -> Sample:
        prepare_all()
        given = {name: a(number) if callable(a) else a for name, a in arguments.items()}
        answer = worker.call(call, **given)
        if clean:
            prepare_all()
        return Sample(**answer) if "value" in answer else throughput(**answer)

    return measure


def first(number: int) -> bool:
    """Return whether this is the first round, in which written files are checked."""
    return number == 0


def seeds(seed: int) -> Callable[[int], int]:
    """Return a function that gives each round a different seed."""
    return lambda number: seed + number


def writes(target: Path, prepare: Prepare = remove, **everywhere: Any) -> Callable[..., Measure]:
    """Return a function that makes a measurement of a worker's writes to a file.

    It receives the worker and further arguments for this worker. The file is checked after the first write.
    """
    return lambda worker, **own: measured(
        *(worker, "write", prepare, [target]), path=target, check=first, **everywhere | own
    )


def reads(source: Path, prepare: Prepare = make_cold, **everywhere: Any) -> Callable[..., Measure]:
    """Return a function that makes a measurement of a worker's reads of a file.

    It receives the worker and further arguments for this worker. The worker checks the bytes of each read.
    """
    return lambda worker, **own: measured(
        *(worker, "read", prepare, [source]), path=source, **everywhere | own
    )


@contextlib.contextmanager
def bench_in(settings: Settings, outcome: Outcome) -> Iterator[Bench]:
    """Yield a bench, and afterwards end its workers and remove its scratch directory."""
    with (
        scratch_directory(settings.directory, "tensorferry-bench-") as directory,
        closing([]) as workers,
    ):
        yield Bench(settings, directory, outcome, workers)


def scenario(fill: Callable[[Bench], None]) -> Callable[[Settings], Outcome]:
    """Make a scenario of a function that fills a bench's outcome; a missing loop device becomes a note."""

    @functools.wraps(fill)
    def run(settings: Settings) -> Outcome:
        outcome = Outcome()
        with bench_in(settings, outcome) as bench:
            try:
                fill(bench)
            except drives.NoLoopDeviceError as reason:
                bench.note(str(reason))
        return outcome

    return run
