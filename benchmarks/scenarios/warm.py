"""Reading a file that the page cache holds: tensorferry must take the faster way by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import Comparison, Contender, Figure, Outcome, Settings, compare
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 13
READINTO = "plain Python readinto"


def run(settings: Settings) -> Outcome:
    """Every contender reads the same file; it is brought back into the cache before each."""
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "source"
        files.write_pattern(path, settings.nbytes, SEED)

        def read(worker: Worker, **options: Any) -> Callable[[int], Any]:
            def measure(number: int) -> Any:
                files.make_warm(path)
                return worker.sample("read", path=str(path), seed=SEED, **options)

            return measure

        ours = "benchmarks.peers.ours"
        plain = make(f"{ours}:Functions", nbytes=settings.nbytes, aligned=False)
        aligned = make(f"{ours}:Functions", nbytes=settings.nbytes, aligned=True)
        handle = make(f"{ours}:Handle", nbytes=settings.nbytes, locked=True)
        buffered = make("benchmarks.peers.plain:Buffered", nbytes=settings.nbytes)
        direct = make("benchmarks.peers.plain:Direct", nbytes=settings.nbytes)
        contenders = [
            Contender("tensorferry.read, torch.empty", "ours", read(plain), ("auto",)),
            Contender("tensorferry.read, tensorferry.empty", "ours", read(aligned), ("auto",)),
            Contender("tensorferry handle, locked", "ours", read(handle), ("auto",)),
            Contender("tensorferry.read direct=True", "ours", read(aligned, direct=True)),
            Contender("tensorferry.read direct=False", "ours", read(aligned, direct=False)),
            Contender(READINTO, "peer", read(buffered)),
            Contender("plain Python, O_DIRECT 8 MiB blocks", "peer", read(direct)),
        ]
        configs = [fio.Config("psync", "1M", 1, direct=False)]
        contenders += fio.contenders(
            fio.usable(configs, settings), path, "read", settings.nbytes, files.make_warm
        )
        comparison = Comparison("warm read", "the whole file in the page cache")
        compare(settings, comparison, contenders)
    outcome.comparisons.append(comparison)

    ways = {
        "readinto": comparison.row(READINTO),
        "direct": comparison.row("tensorferry.read direct=True"),
        "direct by plain Python": comparison.row("plain Python, O_DIRECT 8 MiB blocks"),
    }
    known = {name: row for name, row in ways.items() if row}
    better = max(known, key=lambda name: known[name].median) if known else None
    for row in comparison.rows:
        if "auto" in row.tags:
            value = row.median / known[better].median if better and row.usable else None
            note = f"better way: {better}, {known[better].median:.2f} GB/s" if better else ""
            outcome.figures.append(Figure(f"warm: {row.label}", ">=", 0.95, value, "", note))
    return outcome
