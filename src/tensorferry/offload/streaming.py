"""Weights within a number of bytes: some stay in memory, and the others are read ahead of their use.

All memory is allocated once, as an arena. A weight gives up its range of the arena when a weight that is needed earlier
needs the memory. Whole pages of a file are read directly into the range, without a copy. Two kinds of weights are read
without the rest of their pages: those that would otherwise begin at an address with less alignment than torch's own
tensors, and those in several pieces of the files.

A *step* is one run of a module that has weights, and a *pass*, a forward pass of the model, is a sequence of steps. The
weights of a step are *held*, that is, they stay in memory until the step ends. While a weight is not in memory, the
model has a *stand-in* for it, which raises in every operation (``absent.py``). One thread at a time may use this
module's objects.
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
from tensorferry.offload.absent import absent_parameter
from tensorferry.offload.arena import ALIGN_NBYTES, Arena, round_to_pages
from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.offload.matching import ByteRange, Matched
    from tensorferry.transfer.futures import Future

# Alignment of torch's own tensors. With less, kernels may add elements in another order, and the last bits differ.
_TORCH_ALIGN_NBYTES = 64


@dataclass(eq=False)
class Weight:
    """A weight and its place in memory; while it has none, ``stand_in`` is the parameter in the model."""

    number: int
    matched: Matched
    device: torch.device
    steps: list[int] = field(default_factory=list)  # the steps that need the weight
    # The ranges to read, with their offsets in the weight's memory.
    parts: list[ByteRange] = field(default_factory=list)
    shift: int = 0  # offset of the weight in its memory
    stays: bool = False  # whether the weight is one of those chosen to stay in memory
    at: int | None = None  # offset in the arena; None: not in memory
    placed_to_stay: bool = False  # whether its memory is at the arena's high end
    reading: _WeightRead | None = None
    param: nn.Parameter | None = None
    held: int = 0  # the number of current steps that need the weight
    unused: bool = False  # whether no step has used it since it was read
    event: Any = None  # completes after the last kernels that use it

    def __post_init__(self) -> None:
        found = self.matched
        self.stand_in = absent_parameter(found.name, found.shape, found.dtype, self.device)
        self.parts = found.parts
        first = found.parts[0]
        if len(found.parts) == 1 and first.begin % _TORCH_ALIGN_NBYTES == 0:
            begin = first.begin // ALIGN_NBYTES * ALIGN_NBYTES
            end = min(round_to_pages(first.end), first.stored.file_nbytes)
            self.parts = [first._replace(begin=begin, end=end)]
            self.shift = first.begin - begin

    @property
    def read_nbytes(self) -> int:
        """The number of bytes to read."""
        return sum(part.end - part.begin for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The memory that the weight needs, in whole pages."""
        return round_to_pages(self.read_nbytes)

    def check_place(self) -> None:
        """Raise RuntimeError if another object has replaced the weight's stand-in in the model."""
        for module, name in self.matched.places:
            if module._parameters.get(name) is not self.stand_in:
                raise RuntimeError(
                    f"the weight {self.matched.name} has been replaced in the model ({type(module).__name__}.{name}): "
                    "the model is streamed, and its weights are those of the files; close() the stream first"
                )

    def put(self, tensor: torch.Tensor) -> None:
        """Set the parameter in the model; a replacement set by other code stays, and :meth:`check_place` reports it."""
        for module, name in self.matched.places:
            present = module._parameters.get(name)
            if not any(
                present is ours for ours in (self.stand_in, self.param, self.matched.original)
            ):
                continue
            if isinstance(module, nn.RNNBase):  # its __setattr__ also updates `_flat_weights`
                setattr(module, name, tensor)
            else:
                module._parameters[name] = tensor  # type: ignore[assignment]


class _WeightRead(Read):
    """The read of a weight into its memory."""

    def __init__(self, streaming: Streaming, weight: Weight) -> None:
        self.nbytes = weight.read_nbytes
        self._streaming: Streaming | None = streaming
        self._weight = weight

    def begin(self) -> None:
        assert self._streaming is not None
        self.futures = []
        for part in self._weight.parts:
            self.futures.append(self._streaming.begin_part(self._weight, part))
        # Drop the reference to `streaming`: it makes a reference cycle, because streaming's pipeline has this read.
        self._streaming = None


@dataclass
class WeightCounters:
    """Bytes read, and time spent waiting."""

    read_nbytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    unexpected_steps: int = 0


class Streaming:
    """Weights of files, some of them in memory.

    Parameters
    ----------
    weights : sequence of Weight
        All weights, by number.
    steps : sequence of sequences of int
        The weights that must be in memory in each step, including those of enclosing modules, in the expected order of
        steps.
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
        self._frontier = 0  # weights of all steps before this position are in memory or being read
        self._idle: set[Weight] = set()  # in memory, not held, and free to be dropped
        self._pipeline: Pipeline[_WeightRead] = Pipeline()
        self._held_steps: list[int] = []
        self._busy = False  # whether a call is in progress, or was interrupted
        total = sum(weight.nbytes for weight in weights)
        self._arena = Arena(min(budget_nbytes // ALIGN_NBYTES * ALIGN_NBYTES, total))
        self._memory = self._allocate()
        cuda: Any = torch.cuda
        self._read_stream = cuda.Stream(device) if device.type == "cuda" else None
        if self._read_stream is not None:
            # torch's caching allocator may have reused memory for the arena that kernels on the current stream still
            # use, so the first reads into the arena wait for these kernels.
            self._read_stream.wait_stream(cuda.current_stream(device))
        self._plan()

    def __del__(self) -> None:
        """Cancel reads in flight: otherwise their memory would stay until another transfer begins."""
        if not sys.is_finalizing() and hasattr(self, "_pipeline"):
            self._pipeline.close(wait=False)

    @property
    def memory_nbytes(self) -> int:
        """Size of the arena."""
        return self._arena.nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return sum(weight.matched.nbytes for weight in self._weights if weight.stays)

    @property
    def in_use(self) -> bool:
        """Whether weights are held, or a call is in progress or was interrupted."""
        return self._busy or bool(self._held_steps)

    @property
    def is_parents(self) -> bool:
        """Whether this object belongs to the parent process of a fork()."""
        return self._pipeline.is_parents

    # A pass

    def begin_pass(self) -> None:
        """Begin a pass, which is expected to repeat the previous one."""
        self._check()
        self._release_all()  # releases the weights of modules that ran outside of a pass and were interrupted
        before = self._order.position
        self._order.begin_pass()
        if self._order.changed:
            self._plan()
        if self._order.position != before:
            self._frontier = self._order.position

    def end_pass(self, *, complete: bool) -> None:
        """End a pass; one that is not ``complete`` does not become the expected order."""
        if self._busy:  # a call below was interrupted
            self.reset()
        self._release_all()
        if not complete:
            self._order.abandon_pass()
            self._frontier = 0

    def acquire(self, step: int) -> None:
        """Bring the weights of a step into the model.

        Raises
        ------
        StorageError
            A weight cannot be read.
        RuntimeError
            Other code has replaced a weight in the model.
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
            self._begin_missing(weights)
            self._read_ahead()
            for weight in weights:
                if weight.reading is not None:
                    self._finish(weight)
                if weight.held == 1:
                    assert weight.param is not None
                    weight.put(weight.param)
        except Exception:
            for weight in weights:
                self._release_weight(weight)
            self._busy = False
            raise
        self._held_steps.append(step)
        self._busy = False

    def release(self, step: int) -> None:
        """End a step, if it is the innermost one that has begun."""
        if not self._held_steps or self._held_steps[-1] != step:
            return
        self._busy = True
        self._held_steps.pop()
        for number in self._steps[step]:
            self._release_weight(self._weights[number])
        self._read_ahead()
        self._busy = False

    def _release_all(self) -> None:
        while self._held_steps:
            self.release(self._held_steps[-1])

    def reset(self, *, reopen: bool = True) -> None:
        """Drop all weights and cancel reads, in any state: after an interruption, or in a forked child."""
        self._busy = True
        forked = self.is_parents
        for weight in self._weights if not forked else ():
            # The interruption may have come before the pipeline got this read. Then closing the pipeline would not
            # cancel the read, so cancel it here.
            if weight.reading is not None:
                weight.reading.cancel()
        if forked:
            for file in self._pipeline.files.values():
                file.close()
        self._pipeline.close()  # closing a file waits for all of its reads, including those without a reference
        self._pipeline = Pipeline()
        for weight in self._weights:
            weight.put(weight.stand_in)
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

    # Placement and reads

    def _plan(self) -> None:
        """Choose the weights that stay in memory in passes with the expected order of steps."""
        steps = [self._steps[step] for step in self._order.pass_steps()]
        nbytes = {weight.number: weight.nbytes for weight in self._weights}
        chosen = scan.kept(steps, nbytes, self._arena.nbytes)
        self._idle.clear()
        for weight in self._weights:
            weight.stays = weight.number in chosen
            if weight.at is not None and not weight.held and not weight.stays:
                self._idle.add(weight)

    def _check(self) -> None:
        """Reset if the last call was interrupted, or was in the parent process."""
        if self._busy or self.is_parents:
            self.reset()

    def _allocate(self) -> torch.Tensor:
        if self._device.type != "cpu":
            return torch.empty(self._arena.nbytes, dtype=torch.uint8, device=self._device)
        if not self._arena.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory, _ = _core.allocate(self._arena.nbytes, False)
        return torch.utils.dlpack.from_dlpack(memory)

    def _begin_missing(self, weights: list[Weight]) -> None:
        """Begin reads of weights that are not in memory; any weight that is not held may be dropped for them."""
        try:
            self._begin_each_missing(weights)
        except MemoryBudgetError:
            # The free memory is in ranges that are too short. Drop the step's own weights, too, which no kernel uses
            # yet, and place all of them again.
            for weight in weights:
                if weight.at is not None and weight.held == 1:
                    self._drop(weight)
            self._begin_each_missing(weights)

    def _begin_each_missing(self, weights: list[Weight]) -> None:
        for weight in weights:
            if weight.at is not None:
                continue
            while not self._place(weight):
                here = [one for one in self._weights if one.at is not None and not one.held]
                if not here:
                    raise MemoryBudgetError(
                        f"memory_budget: {self._arena.nbytes} bytes for streamed weights are too few, or too "
                        f"fragmented, for {weight.matched.name}: it needs {weight.nbytes} contiguous bytes, and "
                        f"{self._arena.taken_nbytes} bytes are in use by modules that run",
                        2 * (self._arena.taken_nbytes + weight.nbytes),
                    )
                self._drop(max(here, key=lambda one: (not one.stays, self._distance(one))))
            self._read(weight, _WeightRead(self, weight))

    def _read_ahead(self) -> None:
        """Begin to read the weights of the next steps while there is memory for them."""
        order = self._order
        self._frontier = max(self._frontier, order.position)
        while self._frontier < order.position + order.length:
            for number in self._steps[order.expected(self._frontier)]:
                weight = self._weights[number]
                if weight.at is not None:
                    continue
                reading = _WeightRead(self, weight)
                if not self._pipeline.may_start(reading) or not self._find_place(weight):
                    return
                try:
                    self._read(weight, reading)
                except (OSError, MemoryError):
                    return  # the weight is not needed yet: the step that needs it reads it again, and may raise
            self._frontier += 1

    def _find_place(self, weight: Weight) -> bool:
        """Find memory for a weight of the step at the frontier; drop only weights that are needed after that step."""
        while not self._place(weight):
            if not self._idle:
                return False
            last = max(self._idle, key=self._distance)
            if self._distance(last) <= self._frontier - self._order.position:
                return False
            self._drop(last)
        return True

    def _place(self, weight: Weight) -> bool:
        """Give a weight a free range of the arena; return False if no free range is long enough."""
        weight.at = self._arena.take(weight, weight.nbytes, stays=weight.stays)
        weight.placed_to_stay = weight.stays
        return weight.at is not None

    def _distance(self, weight: Weight) -> float:
        """Return how many steps precede the next step that needs a weight, as far as that is known."""
        # In the first pass the order of steps is only assumed. A weight that was read and not used yet may still be
        # needed soon.
        if weight.unused and not self._order.learned:
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
        """Begin to read a part of a weight into its memory."""
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
        """Make reads that begin in the block wait for kernels that use dropped weights, and for no other kernels."""
        if self._read_stream is None:
            yield
            return
        with torch.cuda.stream(self._read_stream):
            yield

    def _finish(self, weight: Weight) -> None:
        """Wait until a weight has been read."""
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
        self._make_param(weight)

    def _cancel(self, weight: Weight) -> None:
        """Cancel the read of a weight and wait for its end."""
        if weight.reading is not None:
            weight.reading.cancel(wait=True)
            self._pipeline.release(weight.reading)
            weight.reading = None

    def _make_param(self, weight: Weight) -> None:
        assert weight.at is not None
        begin = weight.at + weight.shift
        found = weight.matched
        with torch.inference_mode(False):
            view = self._memory[begin : begin + found.nbytes].view(found.dtype).view(found.shape)
            weight.param = nn.Parameter(view, requires_grad=False)

    def _release_weight(self, weight: Weight) -> None:
        weight.held -= 1
        if weight.held:
            return
        weight.put(weight.stand_in)
        if self._read_stream is not None and weight.param is not None:
            weight.event = torch.cuda.current_stream(self._device).record_event()
        if weight.at is None:
            return
        if weight.stays and not weight.placed_to_stay and weight.param is not None:
            self._drop(weight)  # it will get memory among the weights that stay
        elif not weight.stays:
            self._idle.add(weight)

    def _drop(self, weight: Weight) -> None:
        """Drop a weight from memory."""
        self._cancel(weight)
        self._give_back(weight)
        if self._frontier > self._order.position:
            self._frontier = min(
                self._frontier, self._order.position + int(min(self._distance(weight), 1 << 30))
            )

    def _give_back(self, weight: Weight) -> None:
        """Free a weight's range of the arena; later reads into it wait for kernels that use the weight."""
        if weight.param is not None:
            # If autograd has saved the weight, its version check must fail now, because the memory will be reused.
            torch.autograd.graph.increment_version(weight.param)
            weight.param = None
        if weight.event is not None and self._read_stream is not None:
            self._read_stream.wait_event(weight.event)
            weight.event = None
        self._idle.discard(weight)
        self._arena.give_back(weight)
        weight.at = None
