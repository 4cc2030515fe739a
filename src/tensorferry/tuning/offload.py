"""What a step would take of an offloaded AdamW, or of a training on drives with it.

Reading and writing at once through a store, and arithmetic, are measured; the rest is a sum.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import queue
import re
import shutil
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.tuning.gpus import NO_TORCH
from tensorferry.tuning.scratch import scratch_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MAX_PARAMETERS = 10**14
_BUCKET_NBYTES = 16 << 20
_SLOTS = 16
_MAX_ELEMENTS = 8 << 20
SMALLEST_NBYTES = 1 << 20
# How much of its budget an optimizer has left at a step's end for the next one: the rest is on its way.
_KEPT_SHARE = 0.75

# In bytes for each parameter: what is stored, what a step reads, and what it writes.
LAYOUTS = {"fp32": (8, 8, 8), "bf16, fp32 masters": (12, 12, 12)}
# Of a whole training. Parameters are read in both passes and by the step, which writes them; gradients are written by
# the backward pass and read by the step; state is read and written by it.
TRAINING_LAYOUTS = {"fp32": (16, 24, 16), "bf16, fp32 masters": (16, 20, 16)}
_SHARES = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Job:
    """What is to be measured, and for how many parameters."""

    parameters: int
    folder: Path
    io_nbytes: int
    loops: int
    training: bool = False  # with parameters and gradients on the drive


@dataclass(frozen=True)
class Prediction:
    """A step of one layout with one budget."""

    layout: str
    state_nbytes: int  # all that is stored
    budget_nbytes: int  # 0: one that is small beside the state
    moved_nbytes: int  # read and written together
    written_nbytes: int
    io_seconds: float
    arithmetic_seconds: float

    @property
    def step_seconds(self) -> float:
        """How long it takes: I/O and arithmetic go on at once."""
        return max(self.io_seconds, self.arithmetic_seconds)

    @property
    def limit(self) -> str:
        """What it waits for."""
        return "drive" if self.io_seconds > self.arithmetic_seconds else "arithmetic"


@dataclass(frozen=True)
class Result:
    """What was measured, and what follows from it."""

    job: Job
    io_seconds: list[float]  # of each loop, in which twice `io_nbytes` were moved
    arithmetic_seconds: list[float]
    elements: int
    threads: int
    predictions: list[Prediction]
    free_nbytes: int

    @property
    def nbytes_per_second(self) -> float:
        """Bytes read and written together."""
        return 2 * self.job.io_nbytes / statistics.median(self.io_seconds)

    @property
    def parameters_per_second(self) -> float:
        """What AdamW steps in memory."""
        return self.elements / statistics.median(self.arithmetic_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        measured = ("io_seconds", "nbytes_per_second", "elements", "arithmetic_seconds")
        names = (*measured, "parameters_per_second", "threads")
        return {
            "tensorferry": tensorferry.__version__,
            "parameters": self.job.parameters,
            "training": self.job.training,
            "folder": str(self.job.folder),
            "free_nbytes": self.free_nbytes,
            "measured": {"io_nbytes": self.job.io_nbytes}
            | {name: getattr(self, name) for name in names},
            "predictions": [
                dataclasses.asdict(each) | {"step_seconds": each.step_seconds, "limit": each.limit}
                for each in self.predictions
            ],
        }


def why_not() -> str | None:
    """Return why nothing can be measured here, or None."""
    return NO_TORCH if importlib.util.find_spec("torch") is None else None


def parse_count(text: str) -> int:
    """Return the number that a text such as "7B", "350M" or "1.5e9" means; units are powers of 1000.

    Raises
    ------
    ValueError
        It is no such text, or no number of parameters.
    """
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,3})?)([KMBT]?)", text.strip().upper()
    )
    if match is None:
        raise ValueError(f"{text!r} is no number of parameters such as 350M, 7B or 1.5e9")
    value = float(match[1]) * _UNITS[match[2]]
    if not 1 <= value <= _MAX_PARAMETERS:
        raise ValueError(f"{text} is not between 1 and {_MAX_PARAMETERS} parameters")
    return round(value)


def run(job: Job, told: Callable[[str, int, int], None] = lambda *_: None) -> Result:
    """Measure, and predict.

    Raises
    ------
    StorageError
        The folder has no space for ``io_nbytes``, or cannot be used.
    """
    import torch

    elements = max(min(_MAX_ELEMENTS, job.io_nbytes // 128), 4096)
    params = [torch.nn.Parameter(torch.zeros(elements // 4)) for _ in range(4)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()
    bucket = min(_BUCKET_NBYTES, -(-job.io_nbytes // 4096) * 4096)
    io_seconds, arithmetic_seconds = [], []
    with scratch_directory(job.folder, "tensorferry-bench-") as directory:
        traffic = Traffic([str(directory)], bucket, -(-job.io_nbytes // bucket), _SLOTS)
        try:
            for loop in range(job.loops + 1):  # the first one warms up
                told("offload", loop, job.loops + 1)
                began = time.perf_counter()
                traffic.move(job.io_nbytes, job.io_nbytes)
                moved = time.perf_counter()
                optimizer.step()
                if loop:
                    io_seconds.append(moved - began)
                    arithmetic_seconds.append(time.perf_counter() - moved)
        finally:
            traffic.close()
    stepped = sum(param.numel() for param in params)
    measured = Result(
        job,
        io_seconds,
        arithmetic_seconds,
        stepped,
        torch.get_num_threads(),
        [],
        shutil.disk_usage(job.folder).free,
    )
    rates = measured.nbytes_per_second, measured.parameters_per_second
    layouts = TRAINING_LAYOUTS if job.training else LAYOUTS
    return dataclasses.replace(measured, predictions=predict(job.parameters, *rates, layouts))


def predict(
    parameters: int,
    nbytes_per_second: float,
    parameters_per_second: float,
    layouts: dict[str, tuple[int, int, int]] = LAYOUTS,
) -> list[Prediction]:
    """Return how long steps take, for each layout and some budgets.

    ``nbytes_per_second`` are those read and written together. Of a training it is what AdamW takes, and not the model.
    """
    found = []
    arithmetic_seconds = parameters / parameters_per_second
    for layout, (stored, read, written) in layouts.items():
        for share in _SHARES:
            # What the budget keeps is neither read nor written.
            part = 0.0 if share == 1 else parameters * (1 - share * _KEPT_SHARE)
            moved = math.ceil((read + written) * part)
            found.append(
                Prediction(
                    layout,
                    state_nbytes=stored * parameters,
                    budget_nbytes=round(share * stored * parameters),
                    moved_nbytes=moved,
                    written_nbytes=math.ceil(written * part),
                    io_seconds=moved / nbytes_per_second,
                    arithmetic_seconds=arithmetic_seconds,
                )
            )
    return found


class Traffic:
    """A step's I/O without the step: buckets of a store, read into slots and written from there, as fast as it goes.

    Parameters
    ----------
    directories : list of str
        The store's.
    bucket_nbytes : int
        Size of what is read or written at once.
    buckets, slots : int
        How many there are in the store, and in memory at most.
    """

    def __init__(
        self, directories: list[str], bucket_nbytes: int, buckets: int, slots: int
    ) -> None:
        import torch

        from tensorferry.store import TensorStore

        self._nbytes = bucket_nbytes
        self._store = TensorStore(directories)
        try:
            self._slots = [tensorferry.empty(bucket_nbytes, torch.uint8) for _ in range(slots)]
            self._names = [f"bucket-{number}" for number in range(buckets)]
            self._store.reserve(dict.fromkeys(self._names, bucket_nbytes))
            for at, name in enumerate(self._names):
                self._store.write(name, self._slots[at % slots]).result()
        except BaseException:
            self._store.close()
            raise

    def move(self, read_nbytes: int, written_nbytes: int) -> None:
        """Read so much, in buckets, each written as soon as it has been read, until so much has been written.

        Raises
        ------
        StorageError
            Something could not be read or written.
        """
        to_read = deque(self._names[: -(-read_nbytes // self._nbytes)])
        to_write = -(-written_nbytes // self._nbytes)
        # Whatever ends first is followed up first, which no order of waiting would do.
        ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        moving = 0

        def read_next(slot: Any) -> None:
            nonlocal moving
            if to_read:
                moving += 1
                name = to_read.popleft()
                ticket = self._store.read(name, slot)
                ticket.add_done_callback(
                    lambda ticket: ended.put(lambda: write(name, ticket.result()))
                )

        def write(name: str, slot: Any) -> None:
            nonlocal moving, to_write
            if not to_write:
                read_next(slot)
                return
            to_write -= 1
            moving += 1
            ticket = self._store.write(name, slot)
            ticket.add_done_callback(lambda ticket: ended.put(lambda: read_next(ticket.result())))

        for slot in self._slots:
            read_next(slot)
        while moving:
            follow = ended.get()
            moving -= 1
            follow()

    def close(self) -> None:
        """Give memory and space back."""
        self._store.close()
