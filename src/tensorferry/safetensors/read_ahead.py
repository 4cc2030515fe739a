"""The tensors of one open file, one at a time: mapped, read ahead for callers that request them in order, or read.

Most libraries request tensors one by one in the order of the file. Read-ahead begins with the second of two consecutive
tensors. When a request is out of order, the tensors that were read ahead are dropped. Read-ahead begins again when the
next two requests are in order.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError
from tensorferry.safetensors.frameworks import itemsize_of
from tensorferry.safetensors.loading import SourceFile, aligned
from tensorferry.safetensors.parts import (
    PAGE_NBYTES,
    Files,
    Part,
    PartLoader,
    TensorPart,
    load,
)
from tensorferry.transfer.pipeline import read_ahead_nbytes

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tensorferry.safetensors.frameworks import Framework
    from tensorferry.safetensors.header import Tensor
    from tensorferry.safetensors.sources import Stored
    from tensorferry.transfer.files import File

# One loader reads ahead this many times its budget, which is the number of bytes requested in order so far, up to the
# pipeline's read-ahead: a short run of requests must not cause a long read.
_AHEAD = 16
# Neighbours up to this size together are read into one range of memory, because to read each into its own takes longer.
# A caller that keeps one of them keeps up to this much memory.
_RANGE_NBYTES = 64 << 10


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
        # What was read with the tensor that was taken last from `_ahead`.
        self._ready: dict[str, Any] = {}
        # The range of the file that was requested in order so far.
        self._begin = self._end = 0
        self._closed = False

    def get(self, name: str) -> Any:
        """Return a tensor."""
        source, framework = self.source, self.framework
        tensor = source.tensor(name)
        shape = framework.shape(tensor, source.path)
        if not tensor.nbytes:
            return framework.as_array(framework.empty(0), tensor.dtype, shape)
        if self.is_mapped:
            data = self._mapped(tensor, tensor.begin, tensor.end)
            return framework.as_array(data, tensor.dtype, shape)
        data = framework.memory_of(self._alive.get(name))
        if data is not None:
            return framework.as_array(data, tensor.dtype, shape)
        array = framework.as_array(self._read_in_order(tensor), tensor.dtype, shape)
        self._alive[name] = framework.owner_of(array)
        return array

    def get_part(self, name: str, index: Any) -> Any:
        """Return the part of a tensor that an index selects."""
        framework = self.framework
        part = TensorPart(self.source.stored(name), index, framework)
        if not part.nbytes:
            return part.array()
        if self.is_mapped:
            part.use(self.map(part))
            return part.array()
        if part.is_whole:
            part.memory = framework.memory_of(framework.owner_of(self.get(name)))
            return part.array()
        # The result of lists is a copy in any case.
        key = None if part.selection is None or part.selection.lists else (name, part.positions)
        part.memory = key and framework.memory_of(self._alive.get(key))
        if part.memory is None:
            load(part, self)
        array = part.array()
        if key is not None:
            self._alive[key] = framework.owner_of(array)
        return array

    def open(self, *_: Any, **__: Any) -> File:
        """Return the open file."""
        return self.source.file

    def map(self, part: TensorPart) -> Any:
        """Return the mapped bytes from the first to the last element of a part."""
        return self._mapped(part.stored.tensor, *part.extent)

    def _mapped(self, tensor: Tensor, begin: int, end: int) -> Any:
        if self._map is None:
            self._map = self.source.map()
        # Also for a file that is shorter now: access beyond its end would end the process.
        self.source.file.check()
        data = self.framework.wrap(self._map.bytes(begin, end - begin))
        return aligned(data, tensor, self.framework)

    def close(self, *, wait: bool) -> None:
        """Stop, and drop all tensors that were read ahead. With ``wait``, wait until their reads have ended."""
        with self._lock:
            self._closed = True
            dropped, self._ahead, self._ready = self._ahead, None, {}
        # Closing waits for transfers, so it happens without the lock.
        if dropped is not None:
            dropped.close(wait=wait)

    def _read_in_order(self, tensor: Tensor) -> Any:
        """Read the bytes of a tensor, or take them from what was read ahead; read further ahead if it is in order."""
        name = tensor.name
        with self._lock:
            data, ahead = self._ready.pop(name, None), self._ahead
            if data is None and (ahead is None or not ahead.has_begun(name)):
                # Read-ahead that has not come this far waits for tensors that the caller has passed over.
                if ahead is not None:
                    ahead.close(wait=False)
                is_next = tensor.begin == self._end
                if not is_next:
                    self._begin = tensor.begin
                self._ready = {}
                ahead = self._ahead = self._loader_from(tensor) if is_next else None
            self._end = tensor.end if ahead is None else max(self._end, tensor.end)
            if data is not None:
                return data
            if ahead is not None:
                read_nbytes = self._end - self._begin
                ahead.pipeline.memory_nbytes = min(ahead.pipeline.ahead_nbytes, read_nbytes)
                # The error may be that of a neighbour, and the tensor itself be readable.
                with contextlib.suppress(StorageError):
                    part, memory = ahead.take_memory(name)
                    self._ready = ready = part.split(memory)
                    return ready.pop(name)
        alone = _TensorRange(self.source.stored(name), [tensor], self.framework)
        load(alone, self)
        return alone.split(alone.memory)[name]

    @functools.cached_property
    def _in_order(self) -> list[Tensor]:
        return [each for each in self.source.header.tensors.values() if each.nbytes > 0]

    def _loader_from(self, first: Tensor) -> PartLoader | None:
        """Return a loader of a tensor and those that follow it, within the limits."""
        if self._closed:
            return None
        limit_nbytes = min(read_ahead_nbytes(), first.end - self._begin)
        at = bisect.bisect_left(self._in_order, first.begin, key=operator.attrgetter("begin"))
        end = first.end + _AHEAD * limit_nbytes
        later = itertools.takewhile(
            lambda each: each.nbytes <= limit_nbytes and each.end <= end,
            itertools.islice(self._in_order, at + 1, None),
        )
        most_nbytes = min(limit_nbytes, _RANGE_NBYTES) if self.framework.on_host else 0
        ranges = [[first]]
        for each in later:
            if each.end - ranges[-1][0].begin <= most_nbytes:
                ranges[-1].append(each)
            else:
                ranges.append([each])
        parts = [
            _TensorRange(self.source.stored(tensors[0].name), tensors, self.framework)
            for tensors in ranges
        ]
        return PartLoader(parts, self, limit_nbytes)


class _TensorRange(Part):
    """Tensors that follow one another in a file, and are read together."""

    def __init__(self, stored: Stored, tensors: list[Tensor], framework: Framework) -> None:
        nbytes = tensors[-1].end - tensors[0].begin
        itemsize = itemsize_of(tensors[0].dtype) if len(tensors) == 1 else 1
        super().__init__(tensors[0].begin, (nbytes // itemsize,), itemsize, framework)
        self.stored, self._tensors = stored, tensors
        self.names = [each.name for each in tensors]
        # In memory the tensors are at the same places of pages as in the file, which may have aligned them.
        self._into_page = self.begin % PAGE_NBYTES

    def allocate(self) -> tuple[int, Any]:
        if len(self._tensors) == 1:
            return super().allocate()
        self.memory = memory = _core.map_pieces([None], [0], [self._into_page + self.nbytes])
        return self.begin, self.framework.wrap(memory.bytes(self._into_page, self.nbytes))

    def split(self, memory: Any) -> dict[str, Any]:
        """Return the bytes of each tensor. It can be done once: the pages of several are released with their bytes."""
        if len(self._tensors) == 1:
            return {self.names[0]: memory}
        framework, begin = self.framework, self.begin - self._into_page
        return {
            each.name: aligned(
                framework.wrap(memory.bytes(each.begin - begin, each.nbytes, True)), each, framework
            )
            for each in self._tensors
        }
