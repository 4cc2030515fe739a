"""Saving safetensors: save_file beside safetensors' own, torch's Hugging Face storage beside torch's, and fio.

Rules: one process, fresh files, all on the drive at the end: fsync inside everybody's clock. fio writes one file of as
many bytes with O_DIRECT. The Hugging Face storage saves a whole state by rank 0, and loads it cold and from the page
cache into tensors that are there.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
    ratio,
)
from benchmarks.measure import Stopwatch, touch_memory
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable

SAVE_FILE = "tensorferry.safetensors save_file, sync=True"
THEIR_SAVE_FILE = "safetensors.torch.save_file, fsync"
STORAGE = "tensorferry HuggingFaceStorageWriter/Reader"
THEIR_STORAGE = "torch HuggingFaceStorageWriter/Reader"

_PEER = "benchmarks.scenarios.safetensors_save:Saver"
_FIOS = [
    fio.Config("io_uring", "1M", 32),
    fio.Config("libaio", "1M", 128),
    fio.Config("io_uring", "4M", 32, registered=True, huge=True),
]


class Saver:
    """Saves the weights of a model, in a worker, and loads them."""

    def __init__(self, nbytes: int, ours: bool) -> None:
        import torch

        from benchmarks.scenarios.checkpoint_state import state, tensors

        warnings.filterwarnings("ignore", module="torch")
        found = tensors(state(2 * nbytes))  # half as many bytes in bfloat16
        self._state = {f"t{k}": tensor.to(torch.bfloat16) for k, tensor in enumerate(found)}
        self._nbytes = sum(tensor.nbytes for tensor in self._state.values())
        self._ours = ours

    def save(self, path: str) -> dict[str, Any]:
        """Save to a file."""
        touch_memory(2 * self._nbytes)
        with Stopwatch() as watch:
            if self._ours:
                from tensorferry.safetensors.saving import save_file

                save_file(self._state, path, sync=True)
            else:
                import safetensors.torch

                safetensors.torch.save_file(self._state, path)
                _sync(path)
                _sync(str(Path(path).parent))
        return watch.result(self._nbytes)

    def save_by_storage(self, path: str) -> dict[str, Any]:
        """Save to a directory, by torch.distributed.checkpoint."""
        import torch.distributed.checkpoint as dcp

        touch_memory(2 * self._nbytes)
        writer, _ = self._storage()
        with Stopwatch() as watch:
            dcp.save(self._state, storage_writer=writer(path), no_dist=True)
        return watch.result(self._nbytes)

    def load_by_storage(self, path: str) -> dict[str, Any]:
        """Load from a directory."""
        import torch.distributed.checkpoint as dcp

        _, reader = self._storage()
        with Stopwatch() as watch:
            dcp.load(self._state, storage_reader=reader(path), no_dist=True)
        return watch.result(self._nbytes)

    def _storage(self) -> tuple[Any, Any]:
        if self._ours:
            from tensorferry.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

            return HuggingFaceStorageWriter, HuggingFaceStorageReader
        import torch.distributed.checkpoint as dcp

        return dcp.HuggingFaceStorageWriter, dcp.HuggingFaceStorageReader


def run(settings: Settings) -> Outcome:
    """save_file."""
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "target"
        nbytes = 5 * settings.nbytes // 2

        def save(worker: Worker) -> Callable[[int], Sample]:
            def measure(number: int) -> Sample:
                files.remove(path)
                sample = worker.sample("save", path=str(path))
                files.remove(path)
                return sample

            return measure

        saving = Comparison("safetensors save_file", "fresh file, synced")
        contenders = [
            Contender(SAVE_FILE, "ours", save(make(_PEER, nbytes=nbytes, ours=True))),
            Contender(THEIR_SAVE_FILE, "peer", save(make(_PEER, nbytes=nbytes, ours=False))),
            *_fio_saves(settings, path, nbytes),
        ]
        outcome.comparisons.append(compare(settings, saving, contenders))
        mine = saving.row(SAVE_FILE)
        over_theirs = ratio(mine, saving.row(THEIR_SAVE_FILE))
        outcome.figures.append(Figure("save_file over safetensors", ">=", 2.0, over_theirs))
        _add_over_fio(outcome, "save_file", saving, SAVE_FILE, 0.92)
    return outcome


def run_storage(settings: Settings) -> Outcome:
    """torch.distributed.checkpoint's classes. What takes torch's 10 seconds has three rounds at most."""
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        ours = make(_PEER, nbytes=settings.nbytes, ours=True)
        theirs = make(_PEER, nbytes=settings.nbytes, ours=False)
        saved, model = directory / "saved", directory / "model"

        def save(worker: Worker) -> Callable[[int], Sample]:
            def measure(number: int) -> Sample:
                files.remove_directory(saved)
                sample = worker.sample("save_by_storage", path=str(saved))
                files.remove_directory(saved)
                return sample

            return measure

        def load(worker: Worker, prepare: Callable[[Path], None]) -> Callable[[int], Sample]:
            def measure(number: int) -> Sample:
                for file in model.iterdir():
                    prepare(file)
                return worker.sample("load_by_storage", path=str(model))

            return measure

        ours.sample("save_by_storage", path=str(model))
        (file,) = model.glob("*.safetensors")
        target = directory / "target"
        for name, rules, action, limits, least, over_fio in (
            (
                "save",
                "fresh directory, synced",
                save,
                _fio_saves(settings, target, settings.nbytes),
                8.0,
                0.9,
            ),
            (
                "cold load",
                "cold files",
                lambda worker: load(worker, files.make_cold),
                fio.contenders(
                    fio.usable(_FIOS, settings),
                    file,
                    "read",
                    file.stat().st_size,
                    files.make_cold,
                ),
                2.5,
                0.9,
            ),
            (
                "warm load",
                "cached files",
                lambda worker: load(worker, files.make_warm),
                [],
                1.0,
                None,
            ),
        ):
            comparison = Comparison(f"Hugging Face storage {name}", rules)
            contenders = [
                Contender(STORAGE, "ours", action(ours)),
                Contender(THEIR_STORAGE, "peer", action(theirs)),
                *limits,
            ]
            rounds = min(settings.rounds, 3) if name == "save" else settings.rounds
            outcome.comparisons.append(compare(settings, comparison, contenders, rounds=rounds))
            over = ratio(comparison.row(STORAGE), comparison.row(THEIR_STORAGE))
            outcome.figures.append(Figure(f"Hugging Face {name} over torch", ">=", least, over))
            if over_fio is not None:
                _add_over_fio(outcome, f"Hugging Face {name}", comparison, STORAGE, over_fio)
    return outcome


def _fio_saves(settings: Settings, path: Path, nbytes: int) -> list[Contender]:
    """fio's writes of a fresh file, in whole blocks, with the fsync that everybody's end with."""
    nbytes -= nbytes % (4 * MIB)
    return [
        Contender(c.label, "fio", fio.writes(c, path, nbytes, "--end_fsync=1"), c.tags)
        for c in fio.usable(_FIOS, settings)
    ]


def _add_over_fio(
    outcome: Outcome, what: str, comparison: Comparison, ours: str, least: float
) -> None:
    best = comparison.best("fio")
    if best is None:
        outcome.notes.append("fio is not installed: nothing to compare with")
        return
    over = ratio(comparison.row(ours), best)
    outcome.figures.append(Figure(f"{what} over fio", ">=", least, over))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
