"""What contenders are measured by: a worker's writes to fresh files, and its reads of files made cold or warm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import Comparison, compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.harness import Contender, Sample, Settings
    from benchmarks.worker import Worker


def writes(
    target: Path, prepare: Callable[[Path], None] = files.remove, **everywhere: Any
) -> Callable[..., Callable[[int], Sample]]:
    """Return what makes of a worker, and arguments of its own, its writes of a file; the first one is checked."""

    def write(worker: Worker, **arguments: Any) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            prepare(target)
            check = number == 0
            return worker.sample("write", path=str(target), check=check, **everywhere | arguments)

        return measure

    return write


def reads(
    source: Path, prepare: Callable[[Path], None] = files.make_cold, **everywhere: Any
) -> Callable[..., Callable[[int], Sample]]:
    """Return what makes of a worker, and arguments of its own, its reads of a file; each is checked by the worker."""

    def read(worker: Worker, **arguments: Any) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            prepare(source)
            return worker.sample("read", path=str(source), **everywhere | arguments)

        return measure

    return read


def fresh_and_cold(
    settings: Settings,
    directory: Path,
    name: str,
    contenders: Callable[[Callable[..., Callable[[int], Sample]]], list[Contender]],
    configs: list[fio.Config],
    seed: int,
    source_nbytes: int = 0,
) -> tuple[Comparison, Comparison]:
    """Compare writes of fresh files, then cold reads of one, beside fio; ``contenders`` makes them of what is done."""
    target, source = directory / "target", directory / "source"
    written = Comparison(f"{name} write", "fresh preallocated files, O_DIRECT, no fsync")
    by_fio = fio.contenders(configs, target, "write", settings.nbytes, files.remove)
    compare(settings, written, contenders(writes(target, seed=seed)) + by_fio)
    files.remove(target)
    # One file for all: where a file lies makes a difference, too.
    files.write_pattern(source, source_nbytes or settings.nbytes, seed)
    was_read = Comparison(f"{name} read", "cold file, O_DIRECT")
    by_fio = fio.contenders(configs, source, "read", settings.nbytes, files.make_cold)
    compare(settings, was_read, contenders(reads(source, seed=seed)) + by_fio)
    files.remove(source)
    return written, was_read
