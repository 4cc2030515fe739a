"""Weights within a number of bytes: some stay in memory, and the others are read ahead of their use.

Whole pages of a file are read directly into the memory of a weight (``holder.py``), without a copy. Two kinds of weights
are read without the rest of their pages: those that would otherwise begin at an address with less alignment than
torch's own tensors, and those in several pieces of the files.

A *step* is one run of a module that has weights, and a *pass*, a forward pass of the model, is a sequence of steps.
While a weight is not in memory, the model has a *stand-in* for it, which raises in every operation (``absent.py``). One
thread at a time may use this module's objects.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.base.processes import Owned
from tensorferry.offload import scan
from tensorferry.offload.absent import AbsentWrapper
from tensorferry.offload.arena import ALIGN_NBYTES, round_to_pages
from tensorferry.offload.holder import Counters, Holder, Item, Together, allocate
from tensorferry.transfer.pipeline import read_ahead_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.offload.matching import Matched
    from tensorferry.safetensors.sources import Stored
    from tensorferry.transfer.files import File

# Alignment of torch's own tensors. With less, kernels may add elements in another order, and the last bits differ.
_TORCH_ALIGN_NBYTES = 64


class AbsentWeight(AbsentWrapper, nn.Parameter):
    """The stand-in for a weight that is not in memory."""

    weight_name: str

    def refusal(self, operation: str) -> str:
        """Return the message of the error for an operation."""
        return (
            f"the weight {self.weight_name} is not in memory, and {operation} needs it: the model is streamed from "
            "files, for inference, and a weight is there only while its module runs. If a module's forward() uses "
            "parameters of modules below it, pass the module's class to stream_weights() in blocks=; to change or save "
            "weights, close() the stream first"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<the weight {self.weight_name}, not in memory: {list(self.shape)}, {self.dtype}, {self.device}>"


class Weight(Item):
    """A weight; while it is not used, ``stand_in`` is the parameter in the model."""

    def __init__(self, number: int, matched: Matched, device: torch.device) -> None:
        self.number, self.matched = number, matched
        self.stand_in: AbsentWeight = AbsentWeight.made(matched.shape, matched.dtype, device)
        self.stand_in.weight_name = matched.name
        self.streaming: Streaming
        self._parts, self._shift = matched.parts, 0
        first = matched.parts[0]
        if len(matched.parts) == 1 and first.begin % _TORCH_ALIGN_NBYTES == 0:
            begin = first.begin // ALIGN_NBYTES * ALIGN_NBYTES
            end = min(round_to_pages(first.end), first.stored.file_nbytes)
            self._parts = [first._replace(begin=begin, end=end)]
            self._shift = first.begin - begin  # offset of the weight in its memory
        super().__init__(round_to_pages(sum(part.end - part.begin for part in self._parts)))

    def forget(self) -> None:
        """Set the state of a weight that is not in memory."""
        super().forget()
        self.stored = True
        self.param: nn.Parameter | None = None  # while steps use it
        self.uses = 0  # the number of current steps that use it
        self.event: Any = None  # completes after the last kernels that use it

    def read(self, memory: torch.Tensor) -> Any:
        """Begin to read the weight, after the kernels that have used the memory."""
        with self.streaming.after_kernels():
            return Together(
                [
                    self.streaming.file(part.stored).read_into(
                        memory[part.at : part.at + part.end - part.begin], part.begin
                    )
                    for part in self._parts
                ]
            )

    def left(self) -> None:
        """Make reads that begin now wait for the kernels that use the weight."""
        if self.event is not None:
            self.streaming.read_stream.wait_event(self.event)
            self.event = None

    def begin_use(self, memory: torch.Tensor) -> None:
        """Put the weight into the model."""
        self.uses += 1
        if self.param is None:
            with torch.inference_mode(False):
                values = memory[self._shift : self._shift + self.matched.nbytes]
                values = values.view(self.matched.dtype).view(self.matched.shape)
                self.param = nn.Parameter(values, requires_grad=False)
            self.put(self.param)

    def end_use(self) -> None:
        """Put the stand-in into the model, if no other step uses the weight."""
        self.uses -= 1
        if not self.uses:
            self.put(self.stand_in)
            self.param = None
            if self.streaming.read_stream is not None:
                self.event = torch.cuda.current_stream(self.stand_in.device).record_event()

    def put(self, tensor: torch.Tensor) -> None:
        """Set the parameter in the model; one that other code has set stays."""
        ours = (self.stand_in, self.param, self.matched.original)
        for module, name in self.matched.places:
            present = module._parameters.get(name)
            if not any(present is each for each in ours):
                continue
            if isinstance(module, nn.RNNBase):  # its __setattr__ also updates `_flat_weights`
                setattr(module, name, tensor)
            else:
                module._parameters[name] = tensor  # type: ignore[assignment]


class Streaming(Owned):
    """Weights of files, some of them in memory.

    Parameters
    ----------
    weights : sequence of Weight
        All weights.
    steps : sequence of sequences of Weight
        The weights that each step uses, in the expected order of steps.
    together : sequence of sequences of Weight
        The weights that must be in memory in each step, including those of enclosing modules.
    budget_nbytes : int
        Bytes of memory.
    device : torch.device
        The CPU, or a GPU.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        steps: Sequence[Sequence[Weight]],
        together: Sequence[Sequence[Weight]],
        budget_nbytes: int,
        device: torch.device,
    ) -> None:
        self._weights, self._steps, self._together = weights, steps, together
        self._device = device
        self._order = scan.Order(range(len(steps)))
        self._files: dict[str, File] = {}
        self._held: list[int] = []  # the steps that are running, the innermost last
        self._busy = False  # whether a call is in progress, or was interrupted
        total = sum(weight.nbytes for weight in weights)
        self.nbytes = min(budget_nbytes // ALIGN_NBYTES * ALIGN_NBYTES, total)
        self.counters = Counters()
        cuda: Any = torch.cuda
        self.read_stream: Any = cuda.Stream(device) if device.type == "cuda" else None
        for weight in weights:
            weight.streaming = self
        self._make_holder()
        if self.read_stream is not None:
            # torch's caching allocator may have reused memory for the arena that kernels on the current stream still
            # use, so the first reads into the arena wait for these kernels.
            self.read_stream.wait_stream(cuda.current_stream(device))

    def _make_holder(self, memory: torch.Tensor | None = None) -> None:
        self._set_owner()
        if memory is None and self._device.type == "cpu":
            memory = allocate(self.nbytes, self._device)
        elif memory is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._memory = memory
        self._holder = Holder(
            *(self._weights, self._steps, memory, self._order, self._together),
            ahead_nbytes=read_ahead_nbytes(),
        )
        self._holder.counters = self.counters

    def __del__(self) -> None:
        """Cancel reads in flight: otherwise their memory would stay until another transfer begins."""
        if not sys.is_finalizing() and not self.is_parents:
            self._cancel()

    def _cancel(self) -> None:
        for weight in self._weights:
            if isinstance(weight.moving, Together):
                weight.moving.cancel()

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return sum(weight.matched.nbytes for weight in self._weights if weight.stays)

    @property
    def in_use(self) -> bool:
        """Whether weights are used, or a call is in progress or was interrupted."""
        return self._busy or bool(self._held)

    # A pass

    def begin_pass(self) -> None:
        """Begin a pass, which is expected to repeat the previous one."""
        self._check()
        self._release_all()  # releases the weights of modules that ran outside of a pass and were interrupted
        self._holder.expect(self._order, begin=True)
        if self._order.changed:
            self._holder.choose()

    def end_pass(self, *, complete: bool) -> None:
        """End a pass; one that is not ``complete`` does not become the expected order."""
        if self._busy:  # a call below was interrupted
            self.reset()
        self._release_all()
        if not complete:
            self._order.abandon_pass()

    def acquire(self, step: int) -> None:
        """Bring the weights of a step into the model.

        Raises
        ------
        StorageError
            A weight cannot be read.
        """
        self._check()
        self._busy = True
        try:
            memories = self._holder.hold([step])
        except Exception:
            self._busy = False
            raise
        for weight, memory in zip(self._steps[step], memories, strict=True):
            weight.begin_use(memory)
        self._held.append(step)
        self._busy = False

    def release(self, step: int) -> None:
        """End a step, if it is the innermost one that has begun."""
        if not self._held or self._held[-1] != step:
            return
        self._busy = True
        self._held.pop()
        for weight in self._steps[step]:
            weight.end_use()
        self._holder.read_ahead()
        self._busy = False

    def _release_all(self) -> None:
        while self._held:
            self.release(self._held[-1])

    def reset(self, *, reopen: bool = True) -> None:
        """Drop all weights and cancel reads, in any state: after an interruption, or in a forked child."""
        self._busy = True
        if not self.is_parents:
            self._cancel()
        for file in self._files.values():
            file.close()  # waits for all of its reads, including those without a reference
        self._files.clear()
        # Memory of the parent process, and memory that a view of a weight still uses, is not used again.
        is_free = not self.is_parents and not self._holder.has_users()
        for weight in self._weights:
            weight.put(weight.stand_in)
            weight.forget()
        self._held.clear()
        self._order.abandon_pass()
        if not reopen:
            self.nbytes = 0
        self._make_holder(self._memory if is_free and reopen else None)
        self._busy = False

    def _check(self) -> None:
        """Reset if the last call was interrupted, or was in the parent process."""
        if self._busy or self.is_parents:
            self.reset()

    def file(self, stored: Stored) -> File:
        """Return an open file."""
        if stored.path not in self._files:
            self._files[stored.path] = stored.open()
        return self._files[stored.path]

    def after_kernels(self) -> Any:
        """Return a context manager in which reads wait for kernels that use dropped weights, and for no others."""
        if self.read_stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.read_stream)
