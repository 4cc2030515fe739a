"""A scenario at work: where its files are, its workers, what it compares, and which figures it promises.

A scenario is a function that gets a bench. :func:`scenario` makes of it what ``SCENARIOS`` has, a function from
settings to an ``Outcome``. What is measured, and how, is ``tensorferry.tuning``'s, as for `tensorferry bench`.
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
# Idle threads of torch's pool spin for a while after each operation, and would count as the next one's CPU time.
# DeepSpeed must not build all its ops when it is imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0", "TENSORFERRY_PROFILES": "0"}

Config = fio.Config
LARGE = [  # what a large transfer is compared with
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
# The best of them, for what takes longer.
FEW = [
    Config("io_uring", MIB, 32),
    Config("io_uring", MIB, 128),
    Config("libaio", MIB, 128),
    Config("libaio", MIB, 32, huge_pages=True),
    Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]


@dataclass(frozen=True)
class Settings:
    """How the scenarios run; the command line fills it."""

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
        """Whether sizes are too small for the numbers to mean anything (the tests do this)."""
        return self.nbytes < 64 * MIB


@dataclass
class Figure:
    """One promise about speed, and what was measured for it."""

    what: str
    relation: Literal[">=", "<="]
    target: float
    measured: float | None
    unit: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the median keeps it."""
        if self.measured is None:
            return "not measured"
        kept = (
            self.measured >= self.target if self.relation == ">=" else self.measured <= self.target
        )
        return "met" if kept else "missed"

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        found = self.measured
        reach = [found.low, found.high] if isinstance(found, Estimate) else None
        return vars(self) | {"range": reach, "verdict": self.verdict}


@dataclass
class Outcome:
    """What a scenario found."""

    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """What a scenario works with, and fills: its outcome."""

    settings: Settings
    directory: Path
    outcome: Outcome
    workers: list[Worker]

    @property
    def nbytes(self) -> int:
        """The size of what is large."""
        return self.settings.nbytes

    @property
    def smoke(self) -> bool:
        return self.settings.smoke

    def worker(self, peer: type | str, **named: Any) -> Worker:
        """Return a process with such an object, by its class or as "module:Class"."""
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
        """Measure contenders in rounds, and keep what was found; they are given by label, or whole as ``more``."""
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
        """fio's reads of a file, prepared before each; or writes of one that is new, and gone afterwards."""

        def measure(config: Config) -> Sample:
            (remove if kind == "write" else prepare)(path)
            job = fio.run([path], kind, nbytes, [*config.arguments(), *options])[0]
            if kind == "write":
                remove(path)
            return fio.sample(job, kind)

        return self.each_fio(configs, lambda config, _: measure(config))

    def synced_fio(self, configs: Sequence[Config], nbytes: int) -> list[Contender]:
        """fio's writes of fresh files, in whole blocks, with the fsync that everybody's end with."""
        whole = nbytes - nbytes % (4 * MIB)
        return self.fio(
            configs, self.directory / "target", "write", whole, options=("--end_fsync=1",)
        )

    def each_fio(
        self, configs: Sequence[Config], measure: Callable[[Config, int], Sample]
    ) -> list[Contender]:
        """A contender for each configuration that this machine can run, of what measures it in a round."""
        return [
            Contender(c.label, "fio", lambda number, c=c: measure(c, number), c.tags)  # type: ignore[misc]
            for c in self.usable(configs)
        ]

    def usable(self, configs: Sequence[Config]) -> list[Config]:
        """Those configurations this machine can run: all but the huge-page ones where none are free."""
        if not fio.installed():
            return []
        if self.smoke:
            return list(configs[:1])
        free = fio.free_huge_pages_nbytes() if self.settings.huge_pages else 0
        return [c for c in configs if not c.huge_pages or c.memory_nbytes <= free]

    def rounds_at_most(self, most: int) -> int:
        """The rounds of what takes long, or varies little."""
        return min(most, self.settings.rounds)

    def note(self, text: str) -> None:
        """Say something, once."""
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def at_least(
        self, what: str, target: float, measured: float | None, note: str = "", unit: str = ""
    ) -> None:
        """Promise that what was measured is no less than the target."""
        self.outcome.figures.append(Figure(what, ">=", target, measured, unit, note))

    def at_most(
        self, what: str, target: float, measured: float | None, note: str = "", unit: str = ""
    ) -> None:
        """Promise that what was measured is no more than the target."""
        self.outcome.figures.append(Figure(what, "<=", target, measured, unit, note))

    def over_fio(self, what: str, target: float, comparison: Comparison, label: str) -> None:
        """Promise a part of the best fio's speed."""
        best = comparison.best("fio")
        if best is None:
            self.note("fio is not installed: nothing to compare with")
        note, small = comparison.described(best), comparison.best("fio", "small")
        if small is not best:
            note += f"; {comparison.described(small, 'with 4 KiB pages')}"
        self.at_least(what, target, comparison.over(label, best), note)

    def peak(self, what: str, limit_nbytes: float, comparison: Comparison, label: str) -> None:
        """Promise how much peak memory grows at most."""
        row = comparison.row(label)
        peak = row.peak_growth_nbytes if row else None
        self.at_most(what, limit_nbytes / MIB, None if peak is None else peak / MIB, unit="MiB")

    def deepspeed_wanted(self) -> bool:
        """Whether DeepSpeed takes part; that it was left out is noted."""
        if not self.settings.deepspeed:
            self.note("DeepSpeed was left out on request")
        return self.settings.deepspeed

    def leave_out(self, comparison: Comparison, label: str, missing: str) -> None:
        """Have a note in place of the row of a contender that misses something which need not be there."""
        for row in [
            r for r in comparison.rows if r.label == label and missing in (r.failure or "")
        ]:
            comparison.rows.remove(row)
            self.note(f"{label}: {row.failure}")

    @contextlib.contextmanager
    def on_drives(
        self, nbytes: int, rate: int | None = None, count: int = 1
    ) -> Iterator[list[Bench]]:
        """The same bench on each of some drives over memory (root only), held to a rate where that is given."""
        with contextlib.ExitStack() as stack:
            mounted = [stack.enter_context(drives.loop_mounted(nbytes)) for _ in range(count)]
            if rate and not all(
                stack.enter_context(drives.limited(each, rate)) for each in mounted
            ):
                self.note(f"drives at full speed: {drives.LIMITS} cannot be written")
            workers = stack.enter_context(closing([]))
            yield [replace(self, directory=each, workers=workers) for each in mounted]


def contenders_of(kind: Any, ways: Mapping[str, Measure] | None, *tags: str) -> list[Contender]:
    """Contenders of one kind, of what measures each by its label."""
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
    """What measures by one call of a worker.

    Each of the paths is prepared before, and with ``clean`` afterwards, too. An argument that is a function is given
    the round's number.
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
    """Whether this is the first round, in which what was written is checked."""
    return number == 0


def seeds(seed: int) -> Callable[[int], int]:
    """Another seed for each round."""
    return lambda number: seed + number


def writes(target: Path, prepare: Prepare = remove, **everywhere: Any) -> Callable[..., Measure]:
    """Return what makes of a worker, and arguments of its own, its writes of a file; the first one is checked."""
    return lambda worker, **own: measured(
        *(worker, "write", prepare, [target]), path=target, check=first, **everywhere | own
    )


def reads(source: Path, prepare: Prepare = make_cold, **everywhere: Any) -> Callable[..., Measure]:
    """Return what makes of a worker, and arguments of its own, its reads of a file; each is checked by the worker."""
    return lambda worker, **own: measured(
        *(worker, "read", prepare, [source]), path=source, **everywhere | own
    )


@contextlib.contextmanager
def bench_in(settings: Settings, outcome: Outcome) -> Iterator[Bench]:
    """A bench with a scratch directory and workers, which are gone afterwards."""
    with (
        scratch_directory(settings.directory, "tensorferry-bench-") as directory,
        closing([]) as workers,
    ):
        yield Bench(settings, directory, outcome, workers)


def scenario(fill: Callable[[Bench], None]) -> Callable[[Settings], Outcome]:
    """Make a scenario of a function that fills a bench's outcome; where it has no loop device, that is noted."""

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
