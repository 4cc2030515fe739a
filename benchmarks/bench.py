"""A scenario at work: where its files are, its workers, and what it has found so far.

A scenario is a function that gets a bench. It makes workers, compares what they do, and says what is to be reached;
:func:`scenario` makes of it what ``SCENARIOS`` has, a function from settings to an ``Outcome``.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks import drives, fio
from benchmarks.harness import MIB, Comparison, Contender, Figure, Outcome, compare
from benchmarks.worker import workers
from tensorferry.tuning.scratch import scratch_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness import Kind, Sample, Settings
    from benchmarks.worker import Worker

    Measure = Callable[[int], Sample]


@dataclass
class Bench:
    """What a scenario works with, and fills: its outcome."""

    settings: Settings
    directory: Path
    worker: Callable[..., Worker]
    outcome: Outcome

    @property
    def nbytes(self) -> int:
        """The size of what is large."""
        return self.settings.nbytes

    @property
    def smoke(self) -> bool:
        """Whether sizes are too small for the numbers to mean anything."""
        return self.settings.smoke

    def compare(
        self,
        name: str,
        rules: str,
        contenders: Sequence[Contender],
        unit: str = "GB/s",
        rounds: int | None = None,
    ) -> Comparison:
        """Measure contenders in rounds, and keep what was found."""
        comparison = Comparison(name, rules, unit)
        compare(self.settings, comparison, contenders, rounds=rounds)
        self.outcome.comparisons.append(comparison)
        return comparison

    def leave_out(self, comparison: Comparison, label: str, missing: str) -> None:
        """Have a note in place of the row of a contender that misses something which need not be there."""
        for row in comparison.rows:
            if row.label == label and missing in (row.failure or ""):
                comparison.rows.remove(row)
                self.note(f"{label}: {row.failure}")
                return

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

    def peak(
        self, what: str, limit_nbytes: float, comparison: Comparison, label: str, note: str = ""
    ) -> None:
        """Promise how much peak memory grows at most."""
        row = comparison.row(label)
        peak = row.peak_growth_nbytes if row else None
        measured = None if peak is None else peak / MIB
        self.at_most(what, limit_nbytes / MIB, measured, note, "MiB")

    def deepspeed_wanted(self) -> bool:
        """Whether DeepSpeed takes part; that it was left out is noted."""
        if not self.settings.deepspeed:
            self.note("DeepSpeed was left out on request")
        return self.settings.deepspeed

    @contextlib.contextmanager
    def on_loop_device(self, nbytes: int) -> Iterator[Bench]:
        """The same bench, with workers of its own, on a fast drive over memory (root only)."""
        with drives.loop_mounted(nbytes) as directory, workers() as worker:
            settings = replace(self.settings, directory=directory)
            yield replace(self, settings=settings, directory=directory, worker=worker)

    @contextlib.contextmanager
    def on_two_drives(self, nbytes: int, rate: int) -> Iterator[tuple[Bench, list[Path]]]:
        """The same with two such drives, each held to a rate in bytes per second where the kernel lets it."""
        with contextlib.ExitStack() as stack:
            mounted = [stack.enter_context(drives.loop_mounted(nbytes)) for _ in range(2)]
            held = [stack.enter_context(drives.limited(drive, rate)) for drive in mounted]
            if not all(held):
                self.note(f"drives at full speed: {drives.LIMITS} cannot be written")
            yield replace(self, worker=stack.enter_context(workers())), mounted


def contenders(kind: Kind, ways: Mapping[str, Measure], *tags: str) -> list[Contender]:
    """Contenders of one kind, of what measures each by its label."""
    return [Contender(label, kind, measure, tags) for label, measure in ways.items()]


@contextlib.contextmanager
def bench_in(settings: Settings, outcome: Outcome) -> Iterator[Bench]:
    """A bench with a scratch directory and workers, which are gone afterwards."""
    scratch = scratch_directory(settings.directory, "tensorferry-bench-")
    with scratch as directory, workers() as worker:
        yield Bench(settings, directory, worker, outcome)


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


def synced_fio_writes(
    bench: Bench, configs: Sequence[fio.Config], path: Path, nbytes: int
) -> list[Contender]:
    """fio's writes of fresh files, in whole blocks, with the fsync that everybody's end with."""
    whole = nbytes - nbytes % (4 * MIB)
    return fio.contenders(bench.settings, configs, path, "write", whole, options=("--end_fsync=1",))
