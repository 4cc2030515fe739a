"""Loading 2.5 GB of bfloat16 from one safetensors file, from four, and from a fast device: ours, safetensors, fio.

Rules: one process that loads to the CPU; every page of what was loaded is touched within the time, so that a map costs
what it has put off; all bytes are compared afterwards. Cold: the files are dropped from the page cache before each
load. Warm: they are brought there. Half: the first half of each is. What a cold load leaves in the cache is counted.
All free memory, of which there is little more than is needed, is touched before the clock runs, whoever loads.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    MeasurementError,
    Outcome,
    Sample,
    Settings,
    UnavailableError,
    compare,
    cpu_ratio,
    ratio,
)
from benchmarks.measure import Stopwatch, little_free_memory, touch_free_memory
from benchmarks.scenarios.loop_device import loop_mounted
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

OURS = "tensorferry load_file"
MAP = "safetensors load_file"
PREAD = "safetensors load_file backend=pread"
_TENSOR_NBYTES = 32 << 20

_FIO_NBYTES = GIB  # fio starts at once, and goes on as it starts
# The best of those that `large` tries.
_FIOS = [
    fio.Config("libaio", "1M", 128),
    fio.Config("io_uring", "4M", 32, registered=True, huge=True),
]


class Loader:
    """Loads files again and again, in a worker."""

    def __init__(self, way: str) -> None:
        import safetensors.torch

        import tensorferry.safetensors.torch

        self._load: Callable[[str], dict[str, Any]] = {
            OURS: tensorferry.safetensors.torch.load_file,
            MAP: safetensors.torch.load_file,
            PREAD: lambda path: safetensors.torch.load_file(path, backend="pread"),
        }[way]

    def load(self, paths: list[str], crcs: list[int], fresh: bool) -> dict[str, Any]:
        """Load all files, and touch every page; ``fresh``: into memory that has to be found."""
        if fresh:
            touch_free_memory()
        with Stopwatch() as watch:
            states = [self._load(path) for path in paths]
            for state in states:
                for tensor in state.values():
                    _bytes(tensor)[::4096].sum()
        nbytes = sum(tensor.nbytes for state in states for tensor in state.values())
        if [_crc(state) for state in states] != crcs:
            raise MeasurementError("loaded other bytes than were saved")
        return watch.result(nbytes)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(-1).view(torch.uint8)


def _crc(state: dict[str, Any]) -> int:
    from tensorferry import _core

    crc = 0
    for name in sorted(state):
        crc = _core.crc32(_bytes(state[name]).numpy(), crc)
    return crc


def _save(path: Path, nbytes: int, seed: int) -> int:
    """Write a file of a model's size, and return the checksum of its tensors."""
    import safetensors.torch
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {}
    for at in range(max(1, nbytes // _TENSOR_NBYTES)):
        count = min(_TENSOR_NBYTES, nbytes) // 2
        shape = (count // 1024, 1024)
        state[f"layers.{at}.weight"] = torch.empty(shape, dtype=torch.bfloat16).random_(
            generator=generator
        )
        state[f"layers.{at}.norm"] = torch.ones(1024, dtype=torch.bfloat16)
    safetensors.torch.save_file(state, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _crc(state)


def _make_half(path: Path) -> None:
    """Have the first half of a file in the page cache, and no more."""
    files.make_cold(path)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        left = path.stat().st_size // 2
        while left > 0 and (data := file.read(min(left, 8 << 20))):
            left -= len(data)


def _cached_share(paths: list[Path]) -> float | None:
    """Return what part of the files the page cache holds; None where the kernel does not tell."""
    import tensorferry

    cached = total = 0
    for path in paths:
        with tensorferry.open(path) as file:
            found = file._open_file().residency(0, file.size)
        if found is None:
            return None
        cached, total = cached + found[0], total + found[1]
    return cached / total


def run(settings: Settings) -> Outcome:
    """One cold file."""
    with files.scratch_directory(settings.directory) as directory:
        return _compared(settings, directory, 1, cold=True, fios=fio.usable(_FIOS, settings))


def run_cached(settings: Settings) -> Outcome:
    """One file, all of it or half in the page cache."""
    with files.scratch_directory(settings.directory) as directory:
        return _compared(settings, directory, 1, cached=True)


def run_on_four_files(settings: Settings) -> Outcome:
    """Four files of a quarter of the bytes; fio reads no better than from one."""
    with files.scratch_directory(settings.directory) as directory:
        return _compared(settings, directory, 4, cold=True, cached=True)


def run_on_loop_device(settings: Settings) -> Outcome:
    """One cold file on a device that is as fast as memory (root only)."""
    nbytes = 5 * settings.nbytes // 2
    try:
        with loop_mounted(nbytes + nbytes // 8 + 64 * MIB) as directory:
            fios = fio.usable(_FIOS, settings)
            return _compared(settings, directory, 1, cold=True, fios=fios, fast=True)
    except UnavailableError as reason:
        return Outcome(notes=[str(reason)])


def _compared(
    settings: Settings,
    directory: Path,
    count: int,
    *,
    cold: bool = False,
    cached: bool = False,
    fios: Sequence[fio.Config] = (),
    fast: bool = False,
) -> Outcome:
    outcome = Outcome()
    whole = 5 * settings.nbytes // 2
    with contextlib.ExitStack() as stack:
        if not settings.smoke:
            stack.enter_context(little_free_memory(2 * whole + GIB))
        make = stack.enter_context(workers())
        ways = (OURS, MAP, *([PREAD] if fast and _has_backends() else []))
        peers = {way: make("benchmarks.scenarios.safetensors:Loader", way=way) for way in ways}
        paths = [directory / f"model-{at}-of-{count}.safetensors" for at in range(count)]
        crcs = [_save(path, whole // count, at) for at, path in enumerate(paths)]
        where = f"{count} files" + (" on a loop device" if fast else "")

        def load(state: str, prepare: Callable[[Path], None]) -> Comparison:
            limits = fios if state == "cold" else []
            found = _load(settings, f"{state}, {where}", peers, paths, crcs, prepare, limits)
            outcome.comparisons.append(found)
            return found

        if cold:
            outcome.figures += _cold_figures(load("cold", files.make_cold), where, fast)
        if cold and not fast:
            for path in paths:
                files.make_cold(path)
            names = [str(path) for path in paths]
            peers[OURS].call("load", paths=names, crcs=crcs, fresh=False)
            what = f"cached after a cold load, {where}"
            outcome.figures.append(Figure(what, "<=", 0.0, _cached_share(paths)))
        for state, prepare, target in (
            ("warm", files.make_warm, 0.95),
            ("half", _make_half, 1.0),
        ):
            if cached:
                found = load(state, prepare)
                over = ratio(found.row(OURS), found.row(MAP))
                what = f"{state} load over safetensors' map, {where}"
                outcome.figures.append(Figure(what, ">=", target, over))
    return outcome


def _has_backends() -> bool:
    import inspect

    import safetensors.torch

    return "backend" in inspect.signature(safetensors.torch.load_file).parameters


def _load(
    settings: Settings,
    name: str,
    peers: dict[str, Worker],
    paths: list[Path],
    crcs: list[int],
    prepare: Callable[[Path], None],
    fios: Sequence[fio.Config],
) -> Comparison:
    fresh = prepare is not files.make_warm and not settings.smoke

    def load(worker: Worker) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            for path in paths:
                prepare(path)
            names = [str(path) for path in paths]
            return worker.sample("load", paths=names, crcs=crcs, fresh=fresh)

        return measure

    contenders = [
        Contender(way, "ours" if way == OURS else "peer", load(worker))
        for way, worker in peers.items()
    ]
    nbytes = min(paths[0].stat().st_size, _FIO_NBYTES)
    contenders += fio.contenders(fios, paths[0], "read", nbytes, prepare)
    return compare(settings, Comparison(f"safetensors {name}", f"{name} in a process"), contenders)


def _cold_figures(cold: Comparison, where: str, fast: bool) -> list[Figure]:
    ours, best = cold.row(OURS), cold.best("fio")
    theirs = cold.best("peer")
    figures = []
    if best is not None:
        figures.append(
            Figure(f"cold load over fio, {where}", ">=", 0.8 if fast else 0.92, ratio(ours, best))
        )
    target = 1.5 if fast else 1.0
    what = f"cold load over safetensors' best, {where}"
    figures.append(Figure(what, ">=", target, ratio(ours, theirs)))
    if cold.row(PREAD):
        what = f"CPU seconds for each GB of a cold load over safetensors' pread, {where}"
        figures.append(Figure(what, "<=", 0.5, cpu_ratio(ours, cold.row(PREAD))))
    return figures
