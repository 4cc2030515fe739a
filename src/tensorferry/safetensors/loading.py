"""Loading bytes of an open file into memory, where each range is either mapped or read.

Ranges that the page cache holds, completely or in part, are mapped copy-on-write, which copies nothing. All other
ranges are read with direct I/O into memory on huge pages, by one pipelined transfer. Both kinds are parts of one range
of addresses, the image, so a tensor can span them. Each tensor owns its pages of the image: they are freed with its
last reference, independently of the other tensors.

A mapped page shows the file's content until the process writes to that page. A program that modifies the file in place
therefore changes tensors, and access to a tensor beyond the end of a truncated file raises SIGBUS. The size is checked
when a map is made. A file that is replaced, where a new file is renamed over it, keeps its old content in the map.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import operator
import os
from errno import EISDIR, ENOENT
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorferry
from tensorferry import _core
from tensorferry.base.checks import is_pair, one_of
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError
from tensorferry.safetensors import header
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import itemsize_of
from tensorferry.transfer.pipeline import Read
from tensorferry.transfer.remote import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tensorferry.safetensors.frameworks import Framework

# To query the page cache, a range is divided into runs of this size, a multiple of a huge page. The number of runs is
# limited, because each one can become a separate mapping, and Linux allows a process 65,530 mappings by default
# (vm.max_map_count).
_RUN_NBYTES = 2 << 20
_MAX_RUNS = 256
# A run is mapped if at least this share of it is in the page cache, and the kernel reads the rest into the cache.
# Direct I/O would instead read the whole run, with the bytes that the cache already has, into new memory. The value
# comes from measurements with partly cached files.
_MAPPED_SHARE = 0.1
# One POSIX_FADV_WILLNEED call reads at most the device's read-ahead or its optimal I/O size, whichever is larger. So
# the advice is given in small pieces.
_ADVICE_NBYTES = 256 << 10
# Smaller ranges are read into the framework's own memory instead of an image of whole pages.
_SMALL_NBYTES = 128 << 10


class SourceFile(Owned):
    """An open file with its header. It is thread-safe, and usable in a forked child.

    The file is closed with the last reference, which a handle, a slice or a loader can hold.
    """

    def __init__(self, path: str, direct: str) -> None:
        try:
            self._file = tensorferry.open(path)
        except StorageError as error:
            if error.errno == EISDIR:
                error.strerror = (
                    f"{error.strerror}; remedy: load the safetensors files of a folder with "
                    "tensorferry.safetensors.plans.load_files, and a checkpoint with torch.distributed.checkpoint.load"
                )
            if error.errno != ENOENT:
                raise
            # Programs compare this text, which is safetensors' own.
            raise FileNotFoundError(f"No such file or directory: {path}") from None
        self.path = path
        self.direct = direct
        self.header = header.read(self._file)
        self._set_owner()
        self._map: Any = None  # the mapping of the whole file, made when it is first needed

    @property
    def file(self) -> tensorferry.File:
        """The file. A forked child gets its own, because the parent's worker threads do not exist in the child."""
        if self.is_parents:
            # This reopens the same file through its descriptor, even if the name now refers to another file. Two
            # threads may do this concurrently: either result is correct. `before` keeps the descriptor open meanwhile.
            before = self._file
            self._file = before._reopen()
            self._set_owner()
        return self._file

    def tensor(self, name: str) -> header.Tensor:
        """Return the header's entry for a tensor."""
        found = self.header.tensors.get(name)
        if found is None:
            raise SafetensorError(f"File does not contain tensor {name}", self.path)
        return found

    def is_mapped(self, begin: int, end: int) -> bool:
        """Return whether a range should be mapped as a whole, because the page cache holds all of it."""
        return self._cached_share(begin, end - begin) == 1

    def map(self, begin: int, end: int) -> Any:
        """Return bytes of the file from a mapping of the whole file, which all calls share."""
        if self._map is None:
            self._check_size()
            nbytes = self.header.file_nbytes
            self._map = _core.map_pieces([self.file._open_file()], [0], [nbytes])
        return self._map.bytes(begin, end - begin)

    def image(self, begin: int, end: int) -> Image:
        """Begin to load a range of the file, part mapped and part read."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        file = self.file
        runs = list(self._runs(first, end))
        core = file._open_file()
        sizes = [nbytes for nbytes, _ in runs]
        offsets = list(itertools.accumulate(sizes[:-1], initial=first))
        if any(mapped for _, mapped in runs):
            self._check_size()
        mapping = _core.map_pieces([core if mapped else None for _, mapped in runs], offsets, sizes)
        future = None
        if not all(mapped for _, mapped in runs):
            memory = memoryview(mapping.bytes(0, end - first))
            segments: list[Any] = [
                nbytes if mapped else memory[offset - first : offset - first + nbytes]
                for (nbytes, mapped), offset in zip(runs, offsets, strict=True)
            ]
            # A transfer must begin and end with a buffer. Mapped runs, which are gaps, are cut off at either end.
            skipped = 0
            while isinstance(segments[-1], int):
                segments.pop()
            while isinstance(segments[0], int):
                skipped += segments.pop(0)
            future = file.read_into(segments, first + skipped)
        return Image(mapping, first, future)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, bool]]:
        """Split a range into runs to map and runs to read. Yield the size of each, and whether to map it.

        For runs to map, the kernel is also advised to read the pages that the page cache lacks.
        """
        share = self._cached_share(begin, end - begin)
        if share in (0, 1):
            yield end - begin, share == 1
            return
        run_nbytes = -(-(end - begin) // _MAX_RUNS // _RUN_NBYTES) * _RUN_NBYTES
        # Runs end at multiples of a huge page in the file. The image is placed so that they do in memory, too, which
        # lets each run use huge pages.
        cuts = [begin, *range((begin // run_nbytes + 1) * run_nbytes, end, run_nbytes), end]
        pieces = []
        for at, stop in itertools.pairwise(cuts):
            share = self._cached_share(at, stop - at)
            pieces.append((stop - at, share >= _MAPPED_SHARE))
            if _MAPPED_SHARE <= share < 1:
                self._prefetch(at, stop)
        for mapped, run in itertools.groupby(pieces, operator.itemgetter(1)):
            yield sum(nbytes for nbytes, _ in run), mapped

    def _prefetch(self, begin: int, end: int) -> None:
        """Advise the kernel to read a range into the page cache."""
        descriptor = self.file._open_file().descriptor
        with contextlib.suppress(OSError):  # only advice: without it, page faults read the pages
            for at in range(begin, end, _ADVICE_NBYTES):
                nbytes = min(_ADVICE_NBYTES, end - at)
                os.posix_fadvise(descriptor, at, nbytes, os.POSIX_FADV_WILLNEED)

    def _cached_share(self, begin: int, nbytes: int) -> float:
        """Return the share of a range that is in the page cache.

        Without a query, return 0.0 for a file that must be read, and 1.0 for one that must be mapped.
        """
        if self.file._version is not None:
            return 0.0  # objects in a bucket cannot be mapped
        if self.direct != "auto":
            return float(self.direct == "never")
        found = self.file._open_file().residency(begin, nbytes)
        # Linux before 6.5 has no cachestat(). On such kernels everything is mapped, as safetensors does.
        if found is None:
            return 1.0
        cached, total = found
        return min(cached / total, 1.0) if total else 1.0

    def _check_size(self) -> None:
        nbytes, expected = self.file.size, self.header.file_nbytes
        if nbytes < expected:
            raise SafetensorError(
                f"the file had {expected} bytes when it was opened, and has {nbytes} now", self.path
            )


class Image(NamedTuple):
    """A range of a file in memory. It is complete once the future is done."""

    mapping: Any
    begin: int  # the offset in the file
    future: tensorferry.Future[Any] | None  # None if the whole range is mapped

    def bytes(self, begin: int, end: int, *, alone: bool = False) -> Any:
        """Return bytes of the file. With ``alone``, the result owns its pages, and its last reference frees them."""
        return self.mapping.bytes(begin - self.begin, end - begin, alone)


class PendingLoad(NamedTuple):
    """A load in progress: its transfer, or None if it needs none, and a function for the result after the transfer."""

    future: tensorferry.Future[Any] | None
    finish: Callable[[], Any]

    def result(self) -> Any:
        """Wait for the load, and return its result. If the wait is interrupted, cancel the transfer."""
        if self.future is not None:
            try:
                self.future.result()
            except BaseException:
                self.future.cancel()
                raise
        return self.finish()


class LoadRead(Read):
    """A read of a pipeline (``transfer.pipeline``) that consists of one load, which ``begin`` begins."""

    load: PendingLoad | None = None

    def __init__(self, nbytes: int, begin: Callable[[], PendingLoad]) -> None:
        self.nbytes = nbytes
        self._begin = begin

    def begin(self) -> None:
        """Begin the load."""
        self.load = self._begin()
        self.futures = () if self.load.future is None else (self.load.future,)


def begin_load(
    source: SourceFile, tensors: Iterable[header.Tensor], framework: Framework
) -> PendingLoad:
    """Begin to load several complete tensors, given in the order of their offsets, as a dict of arrays by name.

    Call ``result()`` once only: its arrays become the only owners of the tensors' memory.
    """
    shapes = {tensor: framework.shape(tensor, source.path) for tensor in tensors}
    image: Image | None = None
    future = None
    memories: dict[str, Any] = {}  # the tensors' device memory, where no image is used
    if non_empty := [tensor for tensor in shapes if tensor.nbytes > 0]:
        begin = at = non_empty[0].begin
        if framework.on_host:
            image = source.image(begin, non_empty[-1].end)
            future = image.future
        else:
            segments: list[Any] = []
            for tensor in non_empty:
                memories[tensor.name] = framework.empty(tensor.nbytes)
                segments += [*gap(tensor.begin - at), memories[tensor.name]]
                at = tensor.end
            future = source.file.read_into(segments, begin)

    def array(tensor: header.Tensor, shape: tuple[int, ...]) -> Any:
        if tensor.nbytes == 0:
            data = framework.empty(0)
        elif image is None:
            data = memories.pop(tensor.name)
        else:
            memory = image.bytes(tensor.begin, tensor.end, alone=True)
            data = aligned(framework.wrap(memory), tensor, framework)
        return framework.as_array(data, tensor.dtype, shape)

    return PendingLoad(
        future, lambda: {tensor.name: array(tensor, shape) for tensor, shape in shapes.items()}
    )


def gap(nbytes: int) -> list[int]:
    """Return the segments of a transfer for a gap, which may be empty."""
    return [nbytes] if nbytes else []


def begin_bytes(
    source: SourceFile, tensor: header.Tensor, begin: int, end: int, framework: Framework
) -> PendingLoad:
    """Begin to load bytes of a tensor. Map them if the page cache holds all of them."""
    nbytes = end - begin
    if framework.on_host and nbytes > 0 and source.is_mapped(begin, end):
        mapped = aligned(framework.wrap(source.map(begin, end)), tensor, framework)
        return PendingLoad(None, lambda: mapped)
    if framework.on_host and nbytes >= _SMALL_NBYTES:
        image = source.image(begin, end)
        return PendingLoad(
            image.future,
            lambda: aligned(framework.wrap(image.bytes(begin, end)), tensor, framework),
        )
    data = framework.empty(nbytes)
    future = source.file.read_into(data, begin) if nbytes > 0 else None
    return PendingLoad(future, lambda: data)


def aligned(data: Any, tensor: header.Tensor, framework: Framework) -> Any:
    """Return a tensor's bytes, or a copy if its elements are not aligned to their size.

    The format allows a tensor to begin at any offset, and an image keeps the file's offsets within a page.
    """
    if tensor.begin % itemsize_of(tensor.dtype) == 0:
        return data
    return framework.copy(data)


def checked_direct(direct: Any, backend: Any) -> str:
    """Validate ``direct`` and ``backend``, and return one value of ``direct`` that has the effect of both.

    Raises
    ------
    SafetensorError
        The backend is unknown.
    ValueError
        ``direct`` has an unknown value.
    """
    if backend not in ("mmap", "pread"):
        raise SafetensorError(f'backend {backend!r} is invalid (expected one of: "mmap", "pread")')
    one_of(direct, "direct", ("auto", "always", "never"))
    # backend="pread" means that nothing is mapped.
    return "always" if backend == "pread" and direct == "auto" else str(direct)


def path_of(filename: Any) -> str:
    """Return a path as a string."""
    if not is_pair(filename) and not isinstance(filename, (str, bytes, os.PathLike)):
        raise TypeError(f"filename: {filename!r} is not a path")
    return text_of(filename, "filename")
