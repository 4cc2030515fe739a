"""The tensors of one open file, one at a time: mapped, read ahead for callers that request them in order, or read.

Most libraries request tensors one by one in the order of the file. Read-ahead begins with the second of two consecutive
tensors. When a request is out of order, the tensors that were read ahead are dropped. Read-ahead begins again when the
next two requests are in order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from tensorferry.base.processes import Owned
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.loading import SourceFile, aligned
from tensorferry.safetensors.parts import Files, PartLoader, TensorPart, load
from tensorferry.transfer.pipeline import read_ahead_nbytes

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tensorferry.safetensors.frameworks import Framework
    from tensorferry.safetensors.sources import Stored
    from tensorferry.transfer.files import File

# The number of tensors that one loader reads ahead, for each tensor that was requested in order so far. The limit for
# their bytes is the number of bytes requested in order so far, up to the pipeline's read-ahead: a short run of requests
# must not cause a long read.
_AHEAD_TENSORS = 16


class FileTensors(Owned, Files):
    """The tensors of one open file for one framework. It is thread-safe. A forked child needs its own instance."""

    def __init__(self, source: SourceFile, framework: Framework) -> None:
        self._set_owner()
        self.source = source
        self.framework = framework
        self.is_mapped = framework.on_host and source.is_mapped
        self._map: Any = None  # the mapping of the whole file, made when it is first needed
        # The owners of memory that tensors and slices were read into, as long as they exist. A second request gets the
        # same memory, as it does from a map.
        self._alive: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        # Reentrant, because a signal handler may request a tensor, too.
        self._lock = threading.RLock()
        # Created lazily: a handle may be opened for one tensor only, or used in random order.
        self._ahead: PartLoader | None = None
        self._next = -1  # the position after the last requested tensor
        self._run = self._run_nbytes = 0  # the tensors requested in order so far, and their bytes
        self._closed = False

    def get(self, name: str) -> Any:
        """Return a tensor."""
        stored = self.source.stored(name)
        memory = None
        if stored.tensor.nbytes and not self.is_mapped:
            memory = self.framework.memory_of(self._alive.get(name))
            if memory is None:
                array = self._read_in_order(stored)
                self._alive[name] = self.framework.owner_of(array)
                return array
        part = TensorPart(stored, None, self.framework)
        part.memory = self.map(part) if part.nbytes and self.is_mapped else memory
        return part.array()

    def get_part(self, name: str, index: Any) -> Any:
        """Return the part of a tensor that an index selects."""
        part = TensorPart(self.source.stored(name), index, self.framework)
        if not part.nbytes:
            return part.array()
        if self.is_mapped:
            part.use(self.map(part))
            return part.array()
        if part.is_whole:
            part.memory = self.framework.memory_of(self.framework.owner_of(self.get(name)))
            return part.array()
        # The result of lists is a copy in any case.
        key = None if part.selection is None or part.selection.lists else (name, part.positions)
        part.memory = key and self.framework.memory_of(self._alive.get(key))
        if part.memory is None:
            load(part, self)
        array = part.array()
        if key is not None:
            self._alive[key] = self.framework.owner_of(array)
        return array

    def open(self, *_: Any, **__: Any) -> File:
        """Return the open file."""
        return self.source.file

    def map(self, part: TensorPart) -> Any:
        """Return the mapped bytes from the first to the last element of a part."""
        begin, end = part.extent
        if self._map is None:
            self._map = self.source.map()
        # Also for a file that is shorter now: access beyond its end would end the process.
        self.source.file.check()
        data = self.framework.wrap(self._map.bytes(begin, end - begin))
        return aligned(data, part.stored.tensor, self.framework)

    def close(self, *, wait: bool) -> None:
        """Stop, and drop all tensors that were read ahead. With ``wait``, wait until their reads have ended."""
        with self._lock:
            self._closed = True
            dropped, self._ahead = self._ahead, None
        # Closing waits for transfers, so it happens without the lock.
        if dropped is not None:
            dropped.close(wait=wait)

    def _read_in_order(self, stored: Stored) -> Any:
        """Read a tensor, or take it from what was read ahead; read further ahead if the request is in order."""
        name, nbytes = stored.tensor.name, stored.tensor.nbytes
        with self._lock:
            at, ahead = self._positions[name], self._ahead
            if ahead is None or not ahead.has_begun(name):
                # Read-ahead that has not come this far waits for tensors that the caller has passed over.
                if ahead is not None:
                    ahead.close(wait=False)
                is_next = at == self._next
                if not is_next:
                    self._run = self._run_nbytes = 0
                ahead = self._ahead = self._loader_from(at) if is_next else None
            self._next = at + 1 if ahead is None else max(self._next, at + 1)
            self._run, self._run_nbytes = self._run + 1, self._run_nbytes + nbytes
            if ahead is not None:
                ahead.pipeline.memory_nbytes = min(ahead.pipeline.ahead_nbytes, self._run_nbytes)
                return ahead.take(name)
        part = TensorPart(stored, None, self.framework)
        load(part, self)
        return part.array()

    @functools.cached_property
    def _names(self) -> list[str]:
        tensors = self.source.header.tensors
        return [each for each, tensor in tensors.items() if tensor.nbytes > 0]

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self._names)}

    def _loader_from(self, at: int) -> PartLoader | None:
        """Return a loader of the tensors from a position on, within the limits."""
        if self._closed:
            return None
        tensors = self.source.header.tensors
        limit_nbytes = self._run_nbytes + tensors[self._names[at]].nbytes
        limit_nbytes = min(read_ahead_nbytes(), limit_nbytes)
        names = self._names[at : at + 1 + _AHEAD_TENSORS * (self._run + 1)]
        later = itertools.takewhile(lambda name: tensors[name].nbytes <= limit_nbytes, names[1:])
        parts = []
        for name in (names[0], *later):
            # An error concerns a later tensor. The request for that tensor raises it again.
            with contextlib.suppress(SafetensorError):
                parts.append(TensorPart(self.source.stored(name), None, self.framework))
        return PartLoader(parts, self, limit_nbytes)
