"""Read-ahead for callers that request tensors one by one in the order of the file, as most libraries do.

Read-ahead begins with the second of two consecutive tensors, and only if that tensor is read: mapped tensors are
available at once. When a request is out of order, the tensors that were read ahead are dropped. Read-ahead begins again
when the next two requests are in order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from tensorferry.base.processes import Owned
from tensorferry.safetensors.loading import LoadRead, PendingLoad, SourceFile, begin_bytes
from tensorferry.transfer.pipeline import Pipeline
from tensorferry.transfer.remote import Version

if TYPE_CHECKING:
    from tensorferry.safetensors.frameworks import Framework
    from tensorferry.safetensors.header import Tensor

# The limit for the number of tensors that are read ahead. The limit for their bytes is the number of bytes requested in
# order so far, up to the pipeline's read-ahead: a short run of requests must not cause a long read.
_AHEAD_TENSORS = 64
# Threads that share a handle request neighbouring tensors slightly out of order. A tensor that is further behind the
# last request than this is not expected to be requested any more.
_BEHIND_TENSORS = 8


class ReadAhead(Owned):
    """The read-ahead of one file for one framework. It is thread-safe. A forked child needs its own instance."""

    def __init__(self, source: SourceFile, framework: Framework) -> None:
        self._set_owner()
        self.source = source
        self._framework = framework
        # Reentrant, because a signal handler may request a tensor, too.
        self._lock = threading.RLock()
        self._tensors: list[Tensor] = []  # by offset; filled at the second request
        self._positions: dict[str, int] = {}  # the index of each tensor in `_tensors`, by name
        self._first: Tensor | None = None  # the tensor of the first request
        # Created lazily: a handle may be opened for one tensor only, or used in random order.
        self._pipeline: Pipeline[LoadRead] | None = None
        # The reads ahead, by the position of the tensor. Some may not have begun: they wait in the pipeline.
        self._reads: dict[int, LoadRead] = {}
        # The file's version before the first read in `_reads` began.
        self._version: Version | None = None
        self._next = -1  # the position after the last requested tensor
        self._added = 0  # the position after the last tensor that was added to the pipeline
        self._run_nbytes = 0  # the bytes requested in order so far
        self._closed = False

    def bytes(self, tensor: Tensor) -> Any:
        """Return a tensor's bytes. Unless they are mapped, the caller is their only owner."""
        if tensor.nbytes == 0 or not self._framework.on_host:
            return self._begin(tensor).result()
        with self._lock:
            if self._first is None:  # possibly the only request: the tensors are not indexed yet
                self._first, self._run_nbytes = tensor, tensor.nbytes
                load = self._begin(tensor)
            else:
                self._index_tensors()
                load = self._load_at(tensor, self._positions[tensor.name])
        return load.result()

    def _load_at(self, tensor: Tensor, position: int) -> PendingLoad:
        """Return the load of a tensor, begun before or now, and read further ahead if the request is in order."""
        if self._reads and self._version != Version.of(self.source.file):
            self._drop()  # the file was modified after the reads began: return its current content
        read = self._reads.pop(position, None)
        in_order = read is not None or position == self._next
        if not in_order:
            self._drop()
        self._next = position + 1 if read is None else max(self._next, position + 1)
        self._run_nbytes += tensor.nbytes
        load = self._release(read) or self._begin(tensor)
        if in_order and load.future is not None:
            self._read_further(position)
        return load

    def _release(self, read: LoadRead | None) -> PendingLoad | None:
        """Remove a read from the pipeline, and return its load if it has begun."""
        if read is None or self._pipeline is None:
            return None
        self._pipeline.release(read)
        load, read.load, read.futures = read.load, None, ()
        return load

    def _index_tensors(self) -> None:
        """Index the positions of all tensors, once, and set `_next` as the first request would have done."""
        if self._positions or self._first is None:
            return
        tensors = self.source.header.tensors.values()
        self._tensors = [each for each in tensors if each.nbytes > 0]
        self._positions = {tensor.name: at for at, tensor in enumerate(self._tensors)}
        self._next = self._positions[self._first.name] + 1

    def close(self, *, wait: bool) -> None:
        """Stop, and drop all tensors that were read ahead. With ``wait``, wait until their reads have ended."""
        with self._lock:
            self._closed = True
            dropped = self._reset()
        # Closing waits for transfers, so it happens without the lock.
        if dropped is not None:
            dropped.close(wait=wait)

    def _drop(self) -> None:
        if (dropped := self._reset()) is not None:
            dropped.close(wait=False)

    def _reset(self) -> Pipeline[LoadRead] | None:
        """Forget all reads, and return their pipeline, which the caller must close."""
        dropped, self._pipeline = self._pipeline, None
        self._reads = {}
        self._run_nbytes = self._added = 0
        return dropped

    def _read_further(self, position: int) -> None:
        """Begin to read tensors that follow a position, within the limits."""
        if min(self._reads, default=position) < position - _BEHIND_TENSORS:
            self._drop()
        if self._closed:
            return
        if not self._reads:
            self._version = Version.of(self.source.file)
        if self._pipeline is None:
            self._pipeline = Pipeline()
        pipeline = self._pipeline
        pipeline.memory_nbytes = min(pipeline.ahead_nbytes, self._run_nbytes)
        last = min(position + 1 + _AHEAD_TENSORS, len(self._tensors))
        for at in range(max(position + 1, self._added), last):
            tensor = self._tensors[at]
            if tensor.nbytes > pipeline.memory_nbytes:
                break
            begin = functools.partial(
                begin_bytes, self.source, tensor, tensor.begin, tensor.end, self._framework
            )
            self._reads[at] = LoadRead(tensor.nbytes, begin)
            pipeline.add(self._reads[at])
            self._added = at + 1
        # An error here concerns a later tensor, not the one that the caller has requested. The request for that later
        # tensor raises the error again.
        with contextlib.suppress(Exception):
            pipeline.advance()

    def _begin(self, tensor: Tensor) -> PendingLoad:
        return begin_bytes(self.source, tensor, tensor.begin, tensor.end, self._framework)
