"""Prediction of the time of one optimizer step, for an AdamW with its state on drives.

With ``training``, the parameters and gradients are on the drives, too. Two things are measured: concurrent reads and
writes through a store, and AdamW's arithmetic. The predictions are computed from these. The memory budget is the memory
that the optimizer may use for what is stored on the drives. A bucket is the piece of what is stored that one transfer
moves. A slot is the memory of one bucket.
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
# The share of its memory budget that an optimizer keeps from one step to the next. The rest of the budget is for
# transfers in progress.
_KEPT_SHARE = 0.75

# The bytes for each parameter that are stored, that a step reads, and that it writes.
LAYOUTS = {"fp32": (8, 8, 8), "bf16, fp32 masters": (12, 12, 12)}
# The same three numbers if parameters and gradients are stored, too. Parameters are read in both passes and by the
# step, which also writes them. Gradients are written by the backward pass and read by the step. The state is read and
# written by the step.
TRAINING_LAYOUTS = {"fp32": (16, 24, 16), "bf16, fp32 masters": (16, 20, 16)}
# The memory budgets of the predictions, as shares of the stored bytes.
_SHARES = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Job:
    """The parameters of a prediction."""

    parameters: int
    folder: Path
    io_nbytes: int
    loops: int
    training: bool = False  # whether parameters and gradients are on the drive, too


@dataclass(frozen=True)
class Prediction:
    """The predicted step for one layout (see :data:`LAYOUTS`) and one memory budget."""

    layout: str
    state_nbytes: int  # all stored bytes
    budget_nbytes: int  # 0 means a budget that is small compared with the state
    moved_nbytes: int  # the bytes read and written
    written_nbytes: int
    io_seconds: float
    arithmetic_seconds: float

    @property
    def step_seconds(self) -> float:
        """The time of the step, in which I/O and arithmetic overlap."""
        return max(self.io_seconds, self.arithmetic_seconds)

    @property
    def limit(self) -> str:
        """The bottleneck of the step."""
        return "drive" if self.io_seconds > self.arithmetic_seconds else "arithmetic"


@dataclass(frozen=True)
class Result:
    """The measurements, and the predictions from them."""

    job: Job
    io_seconds: list[float]  # the seconds of each loop, which transfers twice `io_nbytes`
    arithmetic_seconds: list[float]
    elements: int  # the number of parameters whose update was measured
    threads: int
    predictions: list[Prediction]
    free_nbytes: int

    @property
    def nbytes_per_second(self) -> float:
        """The bytes read and written per second, in total."""
        return 2 * self.job.io_nbytes / statistics.median(self.io_seconds)

    @property
    def parameters_per_second(self) -> float:
        """The parameters that AdamW updates per second in memory."""
        return self.elements / statistics.median(self.arithmetic_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
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


def unusable_reason() -> str | None:
    """Return why a measurement is impossible, or None."""
    return NO_TORCH if importlib.util.find_spec("torch") is None else None


def parse_count(text: str) -> int:
    """Parse a number of parameters such as "7B", "350M" or "1.5e9". Units are powers of 1000.

    Raises
    ------
    ValueError
        The text is not such a number, or the number is out of range.
    """
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,3})?)([KMBT]?)", text.strip().upper()
    )
    if match is None:
        raise ValueError(f"{text!r} is not a number of parameters such as 350M, 7B or 1.5e9")
    value = float(match[1]) * _UNITS[match[2]]
    if not 1 <= value <= _MAX_PARAMETERS:
        raise ValueError(f"{text} is not between 1 and {_MAX_PARAMETERS} parameters")
    return round(value)


def run(job: Job, on_progress: Callable[[str, int, int], None] = lambda *_: None) -> Result:
    """Measure and predict.

    Raises
    ------
    StorageError
        The folder lacks space for ``io_nbytes``, or cannot be used.
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
                on_progress("offload", loop, job.loops + 1)
                io_begin = time.perf_counter()
                traffic.move(job.io_nbytes, job.io_nbytes)
                io_end = time.perf_counter()
                optimizer.step()
                if loop:
                    io_seconds.append(io_end - io_begin)
                    arithmetic_seconds.append(time.perf_counter() - io_end)
        finally:
            traffic.close()
    count = sum(param.numel() for param in params)
    measured = Result(
        job,
        io_seconds,
        arithmetic_seconds,
        count,
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
    """Return predictions for each layout and several budgets.

    ``nbytes_per_second`` counts the bytes read and written. ``parameters_per_second`` is the speed of AdamW's
    arithmetic. The model's own computation is not predicted.
    """
    found = []
    arithmetic_seconds = parameters / parameters_per_second
    for layout, (stored, read, written) in layouts.items():
        for share in _SHARES:
            # The part that stays within the budget is neither read nor written.
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
    """The I/O of a step without its arithmetic: buckets of a store are read into slots and written back.

    Parameters
    ----------
    directories : list of str
        The directories of the store.
    bucket_nbytes : int
        The size of one read or write.
    buckets, slots : int
        The number of buckets in the store, and the maximum number in memory.
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
        """Read ``read_nbytes`` in buckets, and write each bucket after its read, up to ``written_nbytes``.

        Raises
        ------
        StorageError
            A bucket cannot be read or written.
        """
        to_read = deque(self._names[: -(-read_nbytes // self._nbytes)])
        to_write = -(-written_nbytes // self._nbytes)
        # Transfers end in any order. With callbacks, the next step of each slot begins as soon as its transfer ends.
        ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        moving = 0

        def read_next(slot: Any) -> None:
            nonlocal moving
            if to_read:
                moving += 1
                name = to_read.popleft()
                future = self._store.read(name, slot)
                future.add_done_callback(
                    lambda future: ended.put(lambda: write(name, future.result()))
                )

        def write(name: str, slot: Any) -> None:
            nonlocal moving, to_write
            if not to_write:
                read_next(slot)
                return
            to_write -= 1
            moving += 1
            future = self._store.write(name, slot)
            future.add_done_callback(lambda future: ended.put(lambda: read_next(future.result())))

        for slot in self._slots:
            read_next(slot)
        while moving:
            next_step = ended.get()
            moving -= 1
            next_step()

    def close(self) -> None:
        """Close the store, and free its space."""
        self._store.close()
