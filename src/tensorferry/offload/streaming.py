"""Weights in a given number of bytes: some stay, others are read ahead of their use into memory that goes round.

All memory is allocated once. A weight has a place in it or none; it has none as soon as its place is wanted for what
comes earlier. It is read in whole pages as it lies in the file, straight into its place, so that no byte is copied on
the way; unless it would then begin where torch never has a tensor begin, or lies in the files in pieces. What a step
wants is held until the step is over. For one thread at a time.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch import nn

from tensorferry import _core
from tensorferry.offload import scan
from tensorferry.offload.absent import absent
from tensorferry.offload.arena import ALIGN_NBYTES, Arena, rounded
from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.offload.matching import ByteRange, Matched
    from tensorferry.transfer.futures import Future

# Where torch's tensors begin. Kernels that find them elsewhere add in another order, and give other last bits.
_TORCH_ALIGN_NBYTES = 64


@dataclass(eq=False)
class Weight:
    """A weight, and where it is."""

    number: int
    matched: Matched
    device: torch.device
    steps: list[int] = field(default_factory=list)
    parts: list[ByteRange] = field(
        default_factory=list
    )  # what is read, and where it goes in the place
    shift: int = 0  # where in the place the weight begins
    stays: bool = False
    at: int | None = None
    placed_to_stay: bool = False
    reading: _WeightRead | None = None
    param: nn.Parameter | None = None
    held: int = 0
    unused: bool = False  # since it was read
    event: Any = None  # of the last kernels that use it

    def __post_init__(self) -> None:
        found = self.matched
        self.away = absent(found.name, found.shape, found.dtype, self.device)
        self.parts = found.parts
        first = found.parts[0]
        if len(found.parts) == 1 and first.begin % _TORCH_ALIGN_NBYTES == 0:
            begin = first.begin // ALIGN_NBYTES * ALIGN_NBYTES
            end = min(rounded(first.end), first.stored.file_nbytes)
            self.parts = [first._replace(begin=begin, end=end)]
            self.shift = first.begin - begin

    @property
    def read_nbytes(self) -> int:
        """What is read of the files."""
        return sum(part.end - part.begin for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return rounded(self.read_nbytes)

    def check_place(self) -> None:
        """Raise RuntimeError where the model has something else than what stands for it."""
        for module, name in self.matched.places:
            if module._parameters.get(name) is not self.away:
                raise RuntimeError(
                    f"the weight {self.matched.name} has been replaced in the model ({type(module).__name__}.{name}): "
                    "the model is streamed, and its weights are those of the files; close() the stream first"
                )

    def put(self, tensor: torch.Tensor) -> None:
        """Be this in the model; what others have put there stays, and is found when the weight is wanted next."""
        for module, name in self.matched.places:
            present = module._parameters.get(name)
            if not any(present is ours for ours in (self.away, self.param, self.matched.original)):
                continue
            if isinstance(module, nn.RNNBase):  # has a list of them beside
                setattr(module, name, tensor)
            else:
                module._parameters[name] = tensor  # type: ignore[assignment]


class _WeightRead(Read):
    """A weight on its way to its place."""

    def __init__(self, streaming: Streaming, weight: Weight) -> None:
        self.nbytes = weight.read_nbytes
        self._streaming: Streaming | None = streaming
        self._weight = weight

    def begin(self) -> None:
        assert self._streaming is not None
        self.futures = []
        for part in self._weight.parts:
            self.futures.append(self._streaming.begin_part(self._weight, part))
        self._streaming = None  # which has the pipeline that has this


@dataclass
class WeightCounters:
    """What has been read and waited for."""

    read_nbytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    unexpected_steps: int = 0


class Streaming:
    """Weights of files, some of them in memory.

    Parameters
    ----------
    weights : sequence of Weight
        All of them, by number.
    steps : sequence of sequences of int
        The weights that each step wants at the same time, with those that are held meanwhile, in the order in which
        steps are expected.
    budget_nbytes : int
        Bytes of memory.
    device : torch.device
        The CPU, or a GPU.

    Raises
    ------
    StorageError
        A file cannot be opened.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        steps: Sequence[Sequence[int]],
        budget_nbytes: int,
        device: torch.device,
    ) -> None:
        self.counters = WeightCounters()
        self._weights = weights
        self._steps = [tuple(dict.fromkeys(step)) for step in steps]
        self._device = device
        self._order = scan.Order(range(len(self._steps)))
        self._frontier = 0  # all steps before this position are here, or on their way
        self._idle: set[Weight] = set()  # have a place, are not held, and need not stay
        self._pipeline: Pipeline[_WeightRead] = Pipeline()
        self._held_steps: list[int] = []
        self._busy = False
        total = sum(weight.nbytes for weight in weights)
        self._arena = Arena(min(budget_nbytes // ALIGN_NBYTES * ALIGN_NBYTES, total))
        self._memory = self._allocate()
        cuda: Any = torch.cuda
        self._side = cuda.Stream(device) if device.type == "cuda" else None
        if self._side is not None:  # whoever had this memory before
            self._side.wait_stream(cuda.current_stream(device))
        self._plan()

    def __del__(self) -> None:
        """Be done with what is on its way: else all memory would stay until somebody begins another transfer."""
        if not sys.is_finalizing() and hasattr(self, "_pipeline"):
            self._pipeline.close(wait=False)

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory."""
        return self._arena.nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the weights that stay."""
        return sum(weight.matched.nbytes for weight in self._weights if weight.stays)

    @property
    def in_use(self) -> bool:
        """Whether somebody holds weights, or is about to."""
        return self._busy or bool(self._held_steps)

    @property
    def is_parents(self) -> bool:
        """Whether fork() has come between."""
        return self._pipeline.is_parents

    # A pass

    def begin_pass(self) -> None:
        """Begin a pass: the one before is what is expected of it."""
        self._check()
        self._release_all()  # what was interrupted outside of a pass
        before = self._order.position
        self._order.begin_pass()
        if self._order.changed:
            self._plan()
        if self._order.position != before:
            self._frontier = self._order.position

    def end_pass(self, *, whole: bool) -> None:
        """Be done with a pass; one that is not whole is no example for the next one."""
        if self._busy:  # interrupted in here
            self.reset()
        self._release_all()
        if not whole:
            self._order.abandon_pass()
            self._frontier = 0

    def acquire(self, step: int) -> None:
        """Have the weights of a step in the model.

        Raises
        ------
        StorageError
            One cannot be read.
        RuntimeError
            The model has something else in the place of one.
        """
        self._check()
        for number in self._steps[step]:
            if not self._weights[number].held:
                self._weights[number].check_place()
        self._busy = True
        if not self._order.used(step):
            self.counters.unexpected_steps += 1
            self._frontier = self._order.position
        weights = [self._weights[number] for number in self._steps[step]]
        for weight in weights:
            weight.held += 1
            weight.unused = False
            self._idle.discard(weight)
        try:
            self._need(weights)
            self._read_ahead()
            for weight in weights:
                if weight.reading is not None:
                    self._finish(weight)
                if weight.held == 1:
                    assert weight.param is not None
                    weight.put(weight.param)
        except Exception:
            for weight in weights:
                self._let_go(weight)
            self._busy = False
            raise
        self._held_steps.append(step)
        self._busy = False

    def release(self, step: int) -> None:
        """Be done with a step, if it was begun."""
        if not self._held_steps or self._held_steps[-1] != step:
            return
        self._busy = True
        self._held_steps.pop()
        for number in self._steps[step]:
            self._let_go(self._weights[number])
        self._read_ahead()
        self._busy = False

    def _release_all(self) -> None:
        while self._held_steps:
            self.release(self._held_steps[-1])

    def reset(self, *, reopen: bool = True) -> None:
        """Have nothing in memory or on its way, whatever was interrupted when, or begun before fork()."""
        self._busy = True
        forked = self.is_parents
        for weight in self._weights if not forked else ():
            if weight.reading is not None:  # the pipeline may not know it yet
                weight.reading.cancel()
        if forked:
            for file in self._pipeline.files.values():
                file.close()
        self._pipeline.close()  # files wait, also for what nobody knows of any more
        self._pipeline = Pipeline()
        for weight in self._weights:
            weight.put(weight.away)
            weight.param = weight.at = weight.event = weight.reading = None
            weight.held = 0
        self._idle.clear()
        self._held_steps.clear()
        self._arena.clear()
        self._order.abandon_pass()
        self._frontier = 0
        if forked and reopen:
            self._memory = self._allocate()
        if not reopen:
            self._memory = torch.empty(0, dtype=torch.uint8)
        self._busy = False

    # What is where

    def _plan(self) -> None:
        steps = [self._steps[step] for step in self._order.pass_()]
        nbytes = {weight.number: weight.nbytes for weight in self._weights}
        chosen = scan.kept(steps, nbytes, self._arena.nbytes)
        self._idle.clear()
        for weight in self._weights:
            weight.stays = weight.number in chosen
            if weight.at is not None and not weight.held and not weight.stays:
                self._idle.add(weight)

    def _check(self) -> None:
        """Begin anew where the last call was interrupted, or was the parent's."""
        if self._busy or self.is_parents:
            self.reset()

    def _allocate(self) -> torch.Tensor:
        if self._device.type != "cpu":
            return torch.empty(self._arena.nbytes, dtype=torch.uint8, device=self._device)
        if not self._arena.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory, _ = _core.allocate(self._arena.nbytes, False)
        return torch.utils.dlpack.from_dlpack(memory)

    def _need(self, weights: list[Weight]) -> None:
        """Begin to read what is not here; whatever is not held may have to go."""
        try:
            self._need_each(weights)
        except MemoryBudgetError:  # there is room, but in pieces: these are not in use yet
            for weight in weights:
                if weight.at is not None and weight.held == 1:
                    self._drop(weight)
            self._need_each(weights)

    def _need_each(self, weights: list[Weight]) -> None:
        for weight in weights:
            if weight.at is not None:
                continue
            while not self._place(weight):
                here = [one for one in self._weights if one.at is not None and not one.held]
                if not here:
                    raise MemoryBudgetError(
                        f"memory_budget: no {weight.nbytes} bytes in one piece are left for "
                        f"{weight.matched.name}: {self._arena.taken_nbytes} of {self._arena.nbytes} are in use",
                        2 * (self._arena.taken_nbytes + weight.nbytes),
                    )
                self._drop(max(here, key=lambda one: (not one.stays, self._distance(one))))
            self._read(weight, _WeightRead(self, weight))

    def _read_ahead(self) -> None:
        """Begin to read what comes next, as far as there is room for it."""
        order = self._order
        self._frontier = max(self._frontier, order.position)
        while self._frontier < order.position + order.length:
            for number in self._steps[order.expected(self._frontier)]:
                weight = self._weights[number]
                if weight.at is not None:
                    continue
                reading = _WeightRead(self, weight)
                if not self._pipeline.has_room(reading) or not self._find_place(weight):
                    return
                try:
                    self._read(weight, reading)
                except (OSError, MemoryError):
                    return  # nobody needs it yet: who does is told
            self._frontier += 1

    def _find_place(self, weight: Weight) -> bool:
        """Place a weight that is wanted at the frontier, where those that are wanted later are in its way at most."""
        while not self._place(weight):
            if not self._idle:
                return False
            last = max(self._idle, key=self._distance)
            if self._distance(last) <= self._frontier - self._order.position:
                return False
            self._drop(last)
        return True

    def _place(self, weight: Weight) -> bool:
        weight.at = self._arena.take(weight, weight.nbytes, stays=weight.stays)
        weight.placed_to_stay = weight.stays
        return weight.at is not None

    def _distance(self, weight: Weight) -> float:
        """Return how many steps come before the next one that wants a weight, as far as that is known."""
        if (
            weight.unused and not self._order.learned
        ):  # the first pass may come back to what it passed over
            return 0
        distances = [self._order.distance(step) for step in weight.steps]
        return min((one for one in distances if one is not None), default=math.inf)

    def _read(self, weight: Weight, reading: _WeightRead) -> None:
        weight.reading = reading
        try:
            self._pipeline.begin(reading)
        except Exception:
            self._cancel(weight)
            self._give_back(weight)
            raise
        if not weight.held and not weight.stays:
            self._idle.add(weight)
        weight.unused = not weight.held
        self.counters.read_nbytes += weight.read_nbytes

    def begin_part(self, weight: Weight, part: ByteRange) -> Future[Any]:
        """Begin to read a part of a weight into its place."""
        assert weight.at is not None
        begin = weight.at + part.at
        place = self._memory[begin : begin + part.end - part.begin]
        files, path = self._pipeline.files, part.stored.path
        file = files.get(path)
        if file is None:
            file = files[path] = part.stored.open()
        with self._after_kernels():
            return file.read_into(place, part.begin)

    @contextlib.contextmanager
    def _after_kernels(self) -> Iterator[None]:
        """Have reads that begin in here wait for kernels that use what has been dropped, and for no others."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def _finish(self, weight: Weight) -> None:
        """Wait until a weight is here."""
        reading = weight.reading
        assert reading is not None
        try:
            began = None if reading.done() else time.perf_counter()
            try:
                reading.wait()
            finally:
                if began is not None:
                    self.counters.waits += 1
                    self.counters.wait_seconds += time.perf_counter() - began
        except Exception:
            self._cancel(weight)
            self._give_back(weight)
            raise
        weight.reading = None
        self._pipeline.release(reading)
        self._make(weight)

    def _cancel(self, weight: Weight) -> None:
        """Have nothing of a weight on its way."""
        if weight.reading is not None:
            weight.reading.cancel(wait=True)
            self._pipeline.release(weight.reading)
            weight.reading = None

    def _make(self, weight: Weight) -> None:
        assert weight.at is not None
        begin = weight.at + weight.shift
        found = weight.matched
        with torch.inference_mode(False):
            view = self._memory[begin : begin + found.nbytes].view(found.dtype).view(found.shape)
            weight.param = nn.Parameter(view, requires_grad=False)

    def _let_go(self, weight: Weight) -> None:
        weight.held -= 1
        if weight.held:
            return
        weight.put(weight.away)
        if self._side is not None and weight.param is not None:
            weight.event = torch.cuda.current_stream(self._device).record_event()
        if weight.at is None:
            return
        if weight.stays and not weight.placed_to_stay and weight.param is not None:
            self._drop(weight)  # its next place will be among those that stay
        elif not weight.stays:
            self._idle.add(weight)

    def _drop(self, weight: Weight) -> None:
        """Have a weight no longer."""
        self._cancel(weight)
        self._give_back(weight)
        if self._frontier > self._order.position:
            self._frontier = min(
                self._frontier, self._order.position + int(min(self._distance(weight), 1 << 30))
            )

    def _give_back(self, weight: Weight) -> None:
        if weight.param is not None:
            # Autograd that has saved it must not take what comes next for it.
            torch.autograd.graph.increment_version(weight.param)
            weight.param = None
        if weight.event is not None and self._side is not None:
            self._side.wait_event(weight.event)
            weight.event = None
        self._idle.discard(weight)
        self._arena.give_back(weight)
        weight.at = None
