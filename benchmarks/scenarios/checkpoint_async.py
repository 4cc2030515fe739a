"""torch.distributed.checkpoint.async_save: how long it blocks training, and until the checkpoint is there.

Rules: one process for each; a state of 2 GiB is saved to a fresh directory, again and again, by the same stager and
writer, as training does; each save is awaited before the next. The first one, which allocates, is not counted. Before
each save the machine's memory is touched: a virtual machine may have given it back to its host, whose page faults would
be counted for those that allocate anew.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import (
    Comparison,
    Contender,
    Figure,
    Outcome,
    Row,
    Sample,
    Settings,
    UnavailableError,
    compare,
    ratio,
)
from benchmarks.measure import touch_memory
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS = "tensorferry.checkpoint.FileSystemWriter"
OVERLAPPED = "the same, Stager(overlap=True)"
DEFAULT = "torch's default"
WRITER = "torch FileSystemWriter as stager"


class AsyncSaver:
    """Saves a state again and again, in a worker."""

    def __init__(self, nbytes: int, how: str) -> None:
        import inspect

        import torch.distributed.checkpoint as dcp

        from benchmarks.scenarios.checkpoint_state import state, state_nbytes
        from tensorferry.checkpoint import FileSystemWriter, Stager

        warnings.filterwarnings("ignore", module="torch")
        self._save: Any = dcp.async_save
        self._options: dict[str, Any] = {}
        if how in (OURS, OVERLAPPED):
            self._options["storage_writer"] = FileSystemWriter("unused")
        elif how == WRITER:
            self._options["storage_writer"] = dcp.FileSystemWriter("unused")
        if how == OVERLAPPED:
            if "async_stager" not in inspect.signature(dcp.async_save).parameters:
                raise UnavailableError("this torch takes no stagers (2.9 and later do)")
            self._options["async_stager"] = Stager(overlap=True)
        self._state = state(nbytes)
        self._nbytes = state_nbytes(self._state)

    def save(self, path: str) -> dict[str, Any]:
        """Save to a directory that is not there."""
        touch_memory(2 * self._nbytes)
        begin = time.perf_counter()
        answer = self._save(self._state, checkpoint_id=path, **self._options)
        blocked = time.perf_counter() - begin
        getattr(answer, "upload_completion", answer).result()
        return {"value": blocked, "seconds": time.perf_counter() - begin}


def run(settings: Settings) -> Outcome:
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        peer = "benchmarks.scenarios.checkpoint_async:AsyncSaver"
        contenders = [
            Contender(
                label,
                "ours" if label in (OURS, OVERLAPPED) else "peer",
                _save(make(peer, nbytes=2 * settings.nbytes, how=label), directory),
            )
            for label in (OURS, OVERLAPPED, DEFAULT, WRITER)
        ]
        blocked = Comparison(
            "async_save blocks", "the training thread", "s", higher_is_better=False
        )
        compare(settings, blocked, contenders)
    total = Comparison(
        "async_save takes", "until the checkpoint is there", "s", higher_is_better=False
    )
    total.rows = [_totals(row) for row in blocked.rows]
    theirs = blocked.row(DEFAULT)
    figures = [
        Figure(f"async_save blocks, over torch's default: {label}", "<=", 0.5, ratio(row, theirs))
        for label, row in ((label, blocked.row(label)) for label in (OURS, OVERLAPPED))
    ]
    return Outcome([blocked, total], figures)


def _save(worker: Worker, directory: Path) -> Callable[[int], Sample]:
    def measure(number: int) -> Sample:
        target = directory / "checkpoint"
        files.remove_directory(target)
        if number == 0:
            worker.call("save", path=str(target))  # the first one allocates
            files.remove_directory(target)
        return Sample(**worker.call("save", path=str(target)))

    return measure


def _totals(row: Row) -> Row:
    samples = [Sample(sample.seconds, sample.seconds) for sample in row.samples]
    return Row(row.label, row.kind, row.tags, samples, row.failure)
