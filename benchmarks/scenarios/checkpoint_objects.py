"""save() and load() of a 2 GiB object against torch.save and torch.load.

Rules: one process for each; saves go to fresh files and end with fsync inside the clock. Loads make new tensors; cold
ones find nothing in the page cache, warm ones all of it. Before each sample the machine's memory is touched: a
virtual machine may have given it back to its host, whose page faults would be counted for new tensors and page cache.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import (
    MIB,
    Comparison,
    Contender,
    Figure,
    MeasurementError,
    Outcome,
    Settings,
    compare,
    peak_figure,
    ratio,
)
from benchmarks.measure import Stopwatch, touch_memory
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS = "tensorferry.checkpoint.save/load"
WRITER = "torch.save to FileWriter"
TORCH = "torch.save/load"
_PEAK_NBYTES_MAX = 64 * MIB


class Keeper:
    """Saves and loads an object again and again, in a worker."""

    def __init__(self, nbytes: int, how: str) -> None:
        from benchmarks.scenarios.checkpoint_state import state, state_nbytes

        self._how = how
        self._state = state(nbytes)
        self._nbytes = state_nbytes(self._state)

    def save(self, path: str) -> dict[str, Any]:
        """Save to a path where nothing is."""
        import torch

        from tensorferry.checkpoint import FileWriter, save

        touch_memory(2 * self._nbytes)
        with Stopwatch() as watch:
            if self._how == OURS:
                save(self._state, path)
            elif self._how == WRITER:
                with FileWriter(path) as file:
                    torch.save(self._state, file)
            else:
                with open(path, "wb") as plain:
                    torch.save(self._state, plain)
                    plain.flush()
                    os.fsync(plain.fileno())
        return watch.result(self._nbytes)

    def load(self, path: str) -> dict[str, Any]:
        """Load, and compare with what was saved."""
        import torch

        from benchmarks.scenarios.checkpoint_state import tensors
        from tensorferry.checkpoint import load

        touch_memory(2 * self._nbytes)
        with Stopwatch() as watch:
            loaded = load(path) if self._how == OURS else torch.load(path, weights_only=True)
        pairs = zip(tensors(loaded), tensors(self._state), strict=True)
        if not all(torch.equal(ours, saved) for ours, saved in pairs):
            raise MeasurementError("loaded other values than were saved")
        result = watch.result(self._nbytes)
        if result["peak_growth_nbytes"] is not None:
            result["peak_growth_nbytes"] = max(0, result["peak_growth_nbytes"] - self._nbytes)
        return result


def run(settings: Settings) -> Outcome:
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        peer = "benchmarks.scenarios.checkpoint_objects:Keeper"
        peers = {
            label: make(peer, nbytes=2 * settings.nbytes, how=label)
            for label in (OURS, WRITER, TORCH)
        }
        loaders = {label: peers[label] for label in (OURS, TORCH)}
        source = directory / "source"
        peers[TORCH].call("save", path=str(source))  # all read the same file
        comparisons = [
            _save(settings, peers, directory / "target"),
            _load(settings, "cold", loaders, source, files.make_cold),
            _load(settings, "warm", loaders, source, files.make_warm),
        ]
    over_torch = [ratio(each.row(OURS), each.row(TORCH)) for each in comparisons]
    names = ("object save over torch.save", "object cold load over torch.load")
    names = (*names, "object warm load over torch.load")
    figures = [
        Figure(what, ">=", target, over)
        for what, target, over in zip(names, (2.5, 1.5, 1.5), over_torch, strict=True)
    ]
    for each in comparisons[:2]:
        what = f"{each.name}, peak memory beside the object"
        figures.append(peak_figure(what, each.row(OURS), _PEAK_NBYTES_MAX))
    return Outcome(comparisons, figures)


def _save(settings: Settings, peers: dict[str, Worker], target: Path) -> Comparison:
    def save(worker: Worker) -> Callable[[int], Any]:
        return _prepared(files.remove, target, lambda: worker.sample("save", path=str(target)))

    comparison = Comparison("object save", "fresh file, fsync at the end")
    compare(settings, comparison, [_contender(label, save(w)) for label, w in peers.items()])
    files.remove(target)
    return comparison


def _load(
    settings: Settings,
    name: str,
    peers: dict[str, Worker],
    source: Path,
    prepare: Callable[[Path], None],
) -> Comparison:
    def load(worker: Worker) -> Callable[[int], Any]:
        return _prepared(prepare, source, lambda: worker.sample("load", path=str(source)))

    comparison = Comparison(f"object {name} load", f"{name} file, new tensors")
    contenders = [_contender(label, load(worker)) for label, worker in peers.items()]
    return compare(settings, comparison, contenders)


def _prepared(
    prepare: Callable[[Path], None], path: Path, measure: Callable[[], Any]
) -> Callable[[int], Any]:
    def prepared(number: int) -> Any:
        prepare(path)
        return measure()

    return prepared


def _contender(label: str, measure: Callable[[int], Any]) -> Contender:
    return Contender(label, "peer" if label == TORCH else "ours", measure)
