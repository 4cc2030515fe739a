"""Tensors that are asked for one by one, as most libraries do: those that follow in the file are read meanwhile.

It begins with the second of two neighbours, and only where the file is read: what is mapped costs nothing to wait for.
Who goes another way gets each tensor as it asks for it, and what was read for nothing is let go.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from tensorferry.base.processes import Owned
from tensorferry.safetensors.loading import Coming, SourceFile, begin_bytes
from tensorferry.transfer.pipeline import Pipeline, Read
from tensorferry.transfer.remote import Version

if TYPE_CHECKING:
    from tensorferry.safetensors.frameworks import Framework
    from tensorferry.safetensors.header import Tensor

# Read ahead at most, beside a limit of bytes: as many as were asked for in order so far, up to the read-ahead.
_AHEAD_TENSORS = 64
# Threads that share a handle ask for neighbours in any order. What lies further back is not asked for any more.
_BEHIND_TENSORS = 8


class _Next(Read):
    """A tensor that follows."""

    def __init__(self, source: SourceFile, tensor: Tensor, framework: Framework) -> None:
        self.nbytes = tensor.nbytes
        self.coming: Coming | None = None
        self._what = source, tensor, tensor.begin, tensor.end, framework

    def begin(self) -> None:
        self.coming = begin_bytes(*self._what)
        self.futures = () if self.coming.future is None else (self.coming.future,)


class Ahead(Owned):
    """What of one file comes next, for a framework. Any number of threads may use it; a forked child needs its own."""

    def __init__(self, source: SourceFile, framework: Framework) -> None:
        self._belong_here()
        self._source = source
        self._framework = framework
        self._lock = threading.RLock()  # who handles a signal may ask for a tensor, too
        self._tensors: list[Tensor] = []  # in their order, once two of them were asked for
        self._places: dict[str, int] = {}
        self._first: Tensor | None = None
        # Made when something is read ahead: a handle may be opened for one tensor, or asked in any order.
        self._pipeline: Pipeline[_Next] | None = None
        self._coming: dict[int, _Next] = {}  # by place; perhaps not begun
        self._version: Version | None = None  # of the file, when the first of them was begun
        self._next = -1  # the place behind the last that was asked for
        self._added = 0  # and that behind the last that was added to the pipeline
        self._run_nbytes = 0  # asked for in order
        self._closed = False

    @property
    def begun(self) -> int:
        """How many tensors are here, or on their way, that nobody has asked for."""
        return sum(read.begun for read in self._coming.values())

    def bytes(self, tensor: Tensor) -> Any:
        """Return a tensor's bytes, which nobody else gets unless they are mapped."""
        if tensor.nbytes == 0 or not self._framework.on_host:
            return self._begin(tensor).result()
        with self._lock:
            if self._first is None:  # perhaps the only one that is asked for
                self._first, self._run_nbytes = tensor, tensor.nbytes
                coming = self._begin(tensor)
            else:
                self._know_places()
                coming = self._in_turn(tensor, self._places[tensor.name])
        return coming.result()

    def _in_turn(self, tensor: Tensor, place: int) -> Coming:
        if self._coming and self._version != Version.of(self._source.file):
            self._drop()  # it has been written to: who asks now gets what there is now
        read = self._coming.pop(place, None)
        in_order = read is not None or place == self._next
        if not in_order:
            self._drop()
        self._next = place + 1 if read is None else max(self._next, place + 1)
        self._run_nbytes += tensor.nbytes
        coming = self._taken(read) or self._begin(tensor)
        if in_order and coming.future is not None:
            self._go_ahead(place)
        return coming

    def _taken(self, read: _Next | None) -> Coming | None:
        """Return what was begun of a tensor, of which the pipeline then keeps nothing."""
        if read is None or self._pipeline is None:
            return None
        self._pipeline.release(read)
        coming, read.coming, read.futures = read.coming, None, ()
        return coming

    def _know_places(self) -> None:
        """Find which tensors follow which, as if that had been known when the first one was asked for."""
        if self._places or self._first is None:
            return
        tensors = self._source.header.tensors.values()
        self._tensors = [each for each in tensors if each.nbytes > 0]
        self._places = {tensor.name: at for at, tensor in enumerate(self._tensors)}
        self._next = self._places[self._first.name] + 1

    def close(self, *, wait: bool) -> None:
        """Let go of what nobody has asked for, and read no more ahead; ``wait``: until memory and file are free."""
        with self._lock:
            self._closed = True
            dropped = self._forget()
        if dropped is not None:
            dropped.close(wait=wait)

    def _drop(self) -> None:
        if (dropped := self._forget()) is not None:
            dropped.close(wait=False)

    def _forget(self) -> Pipeline[_Next] | None:
        """Begin anew; return the pipeline of what was read ahead, to be closed."""
        dropped, self._pipeline = self._pipeline, None
        self._coming = {}
        self._run_nbytes = self._added = 0
        return dropped

    def _go_ahead(self, place: int) -> None:
        if min(self._coming, default=place) < place - _BEHIND_TENSORS:
            self._drop()
        if self._closed:
            return
        if not self._coming:
            self._version = Version.of(self._source.file)
        if self._pipeline is None:
            self._pipeline = Pipeline()
        pipeline = self._pipeline
        pipeline.memory_nbytes = min(pipeline.ahead_nbytes, self._run_nbytes)
        last = min(place + 1 + _AHEAD_TENSORS, len(self._tensors))
        for at in range(max(place + 1, self._added), last):
            tensor = self._tensors[at]
            if tensor.nbytes > pipeline.memory_nbytes:
                break
            self._coming[at] = _Next(self._source, tensor, self._framework)
            pipeline.add(self._coming[at])
            self._added = at + 1
        with contextlib.suppress(Exception):  # who asks for it will meet it
            pipeline.advance()

    def _begin(self, tensor: Tensor) -> Coming:
        return begin_bytes(self._source, tensor, tensor.begin, tensor.end, self._framework)
