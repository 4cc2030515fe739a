"""What contenders are measured by: calls of a worker, each with its files fresh, cold or warm before the clock runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.bench import Bench, Measure
    from benchmarks.harness import Comparison, Contender, Sample
    from benchmarks.worker import Worker

    Prepare = Callable[[Path], None]


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

    def measure(number: int) -> Sample:
        _prepare_all(prepare, paths)
        given = {name: a(number) if callable(a) else a for name, a in arguments.items()}
        sample = worker.sample(call, **given)
        if clean:
            _prepare_all(prepare, paths)
        return sample

    return measure


def _prepare_all(prepare: Prepare | None, paths: Sequence[Path]) -> None:
    if prepare:
        for path in paths:
            prepare(path)


def first(number: int) -> bool:
    """Whether this is the first round, in which what was written is checked."""
    return number == 0


def seeds(seed: int) -> Callable[[int], int]:
    """Another seed for each round."""
    return lambda number: seed + number


def writes(
    target: Path, prepare: Prepare = files.remove, **everywhere: Any
) -> Callable[..., Measure]:
    """Return what makes of a worker, and arguments of its own, its writes of a file; the first one is checked."""
    return _calls("write", prepare, target, check=first, **everywhere)


def reads(
    source: Path, prepare: Prepare = files.make_cold, **everywhere: Any
) -> Callable[..., Measure]:
    """Return what makes of a worker, and arguments of its own, its reads of a file; each is checked by the worker."""
    return _calls("read", prepare, source, **everywhere)


def _calls(call: str, prepare: Prepare, path: Path, **everywhere: Any) -> Callable[..., Measure]:
    def of(worker: Worker, **arguments: Any) -> Measure:
        given = {"path": str(path), **everywhere, **arguments}
        return measured(worker, call, prepare, [path], **given)

    return of


def fresh_and_cold(
    bench: Bench,
    name: str,
    contenders: Callable[[Callable[..., Measure]], list[Contender]],
    configs: list[fio.Config],
    seed: int,
    source_nbytes: int = 0,
) -> tuple[Comparison, Comparison]:
    """Compare writes of fresh files, then cold reads of one, beside fio; ``contenders`` makes them of what is done."""
    target, source = bench.directory / "target", bench.directory / "source"

    def by_fio(path: Path, kind: str) -> list[Contender]:
        return fio.contenders(bench.settings, configs, path, kind, bench.nbytes)

    written = bench.compare(
        f"{name} write",
        "fresh preallocated files, O_DIRECT, no fsync",
        contenders(writes(target, seed=seed)) + by_fio(target, "write"),
    )
    files.remove(target)
    # One file for all: where a file lies makes a difference, too.
    files.write_pattern(source, source_nbytes or bench.nbytes, seed)
    was_read = bench.compare(
        f"{name} read",
        "cold file, O_DIRECT",
        contenders(reads(source, seed=seed)) + by_fio(source, "read"),
    )
    files.remove(source)
    return written, was_read
