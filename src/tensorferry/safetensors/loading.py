"""The bytes of an open file: which are mapped, which are read, and what keeps them.

What the page cache holds, or has some of, is mapped, copy on write, which costs nothing; all else is read past it into
memory on huge pages, by one pipelined transfer. Both are ranges of one piece of addresses, the file's image, so a
tensor may lie across them. Each tensor owns its pages of the image: with its last reference they are free again,
whatever becomes of the others.

A map is the file as long as nobody changes a page of it: who writes to the file in place changes tensors, and who cuts
it off has the process killed by SIGBUS when these are touched. The size is checked when a map is made. Files that are
replaced (a new one renamed over the name) go on as they were.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from errno import ENOENT
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorferry
from tensorferry import _core
from tensorferry.base.checks import is_pair
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError
from tensorferry.safetensors import header
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import itemsize_of
from tensorferry.transfer.remote import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tensorferry.safetensors.frameworks import Framework

DIRECT = ("auto", "always", "never")

# The page cache is looked at by runs of so many bytes, a multiple of huge pages, and by no more runs than these: each
# one is a mapping of its own, of which a process has 65,530.
_RUN_NBYTES = 2 << 20
_MAX_RUNS = 256
# A run of which the cache holds so much is mapped, and the rest brought there: reading it would fill fresh memory with
# what is in memory already. Measured on files of which tenths were missing here and there.
_MAPPED_SHARE = 0.1
# The kernel reads no more for one call than a device's readahead or its best request, whichever is more.
_ADVICE_NBYTES = 256 << 10
# What is smaller is read into memory of the framework's, together with what surrounds it.
_SMALL_NBYTES = 128 << 10


class SourceFile(Owned):
    """A file that is open for loading, with its header. Any number of threads may use it, in forked children, too.

    It is closed with its last reference: that of the handle, slices, or a loader.
    """

    def __init__(self, path: str, direct: str) -> None:
        try:
            self._file = tensorferry.open(path)
        except StorageError as error:
            if error.errno != ENOENT:
                raise
            # As safetensors says it.
            raise FileNotFoundError(f"No such file or directory: {path}") from None
        self.path = path
        self.direct = direct
        self.header = header.read(self._file)
        self._belong_here()
        self._map: Any = None  # of all the file

    @property
    def file(self) -> tensorferry.File:
        """The file; a forked child's own, whose workers its parent's are not."""
        if self.is_parents:
            # The same file, whatever has its name now. Two threads may both do so, and both files are right.
            before = self._file  # kept, and so open, while its descriptor is used
            self._file = before._again()
            self._belong_here()
        return self._file

    def tensor(self, name: str) -> header.Tensor:
        """Return what the header says of a tensor."""
        found = self.header.tensors.get(name)
        if found is None:
            raise SafetensorError(f"File does not contain tensor {name}", self.path)
        return found

    def is_mapped(self, begin: int, end: int) -> bool:
        """Return whether bytes are to be mapped, all of them: the cache has them."""
        return self._cached_share(begin, end - begin) == 1

    def map(self, begin: int, end: int) -> Any:
        """Return bytes of the file as they are mapped: one map for all calls."""
        if self._map is None:
            self._check_size()
            nbytes = self.header.file_nbytes
            self._map = _core.map_pieces([self.file._open_file()], [0], [nbytes])
        return self._map.bytes(begin, end - begin)

    def image(self, begin: int, end: int) -> Image:
        """Begin to have bytes of the file in memory, mapped or read."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        file = self.file
        runs = list(self._runs(first, end))
        core = file._open_file()
        offsets, sizes = [], []
        at = first
        for nbytes, _ in runs:
            offsets.append(at)
            sizes.append(nbytes)
            at += nbytes
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
            # Bytes passed over at either end are none of the transfer.
            skipped = 0
            while isinstance(segments[-1], int):
                segments.pop()
            while isinstance(segments[0], int):
                skipped += segments.pop(0)
            future = file.read_into(segments, first + skipped)
        return Image(mapping, first, future)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, bool]]:
        """Return runs of bytes that are alike, and whether they are to be mapped.

        What the cache lacks of those is asked for.
        """
        share = self._cached_share(begin, end - begin)
        if share in (0, 1):
            yield end - begin, share == 1
            return
        run_nbytes = -(-(end - begin) // _MAX_RUNS // _RUN_NBYTES) * _RUN_NBYTES
        # They end where huge pages of the file do, and so where those of the image do.
        cuts = [begin, *range((begin // run_nbytes + 1) * run_nbytes, end, run_nbytes), end]
        alike, before = 0, False
        for at, stop in itertools.pairwise(cuts):
            share = self._cached_share(at, stop - at)
            mapped = share >= _MAPPED_SHARE
            if mapped and share < 1:
                self._bring(at, stop)
            if alike and mapped != before:
                yield alike, before
                alike = 0
            alike, before = alike + stop - at, mapped
        yield alike, before

    def _bring(self, begin: int, end: int) -> None:
        """Have the page cache read bytes that will be touched soon."""
        descriptor = self.file._open_file().descriptor
        with contextlib.suppress(OSError):  # advice: without it pages come as they are touched
            for at in range(begin, end, _ADVICE_NBYTES):
                nbytes = min(_ADVICE_NBYTES, end - at)
                os.posix_fadvise(descriptor, at, nbytes, os.POSIX_FADV_WILLNEED)

    def _cached_share(self, begin: int, nbytes: int) -> float:
        """Return what part of bytes the page cache has, or is to be taken to have."""
        if self.file._version is not None:
            return 0.0  # what is elsewhere cannot be mapped
        if self.direct != "auto":
            return float(self.direct == "never")
        found = self.file._open_file().residency(begin, nbytes)
        if found is None:  # the kernel does not tell (before Linux 6.5): as safetensors does
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
    """Bytes of a file in memory, or on their way."""

    mapping: Any
    begin: int  # where in the file
    future: tensorferry.Future[Any] | None

    def bytes(self, begin: int, end: int, *, alone: bool = False) -> Any:
        """Return bytes of the file; ``alone``: nobody else ever gets them, and they are gone with their owner."""
        return self.mapping.bytes(begin - self.begin, end - begin, alone)


class Load:
    """Whole tensors that are neighbours in a file, on their way into memory by one transfer.

    Parameters
    ----------
    source : SourceFile
        The file.
    tensors : iterable of header.Tensor
        In the order of their bytes.
    framework : Framework
        Whose arrays they become.
    """

    def __init__(
        self, source: SourceFile, tensors: Iterable[header.Tensor], framework: Framework
    ) -> None:
        self._framework = framework
        self._shapes = {
            tensor: framework.shape(tensor.dtype, tensor.shape, source.path, tensor.name)
            for tensor in tensors
        }
        self._image: Image | None = None
        self._arrays: dict[str, Any] = {}  # that are read into as they are
        self.future: tensorferry.Future[Any] | None = None
        there = [tensor for tensor in self._shapes if tensor.nbytes > 0]
        if not there:
            return
        if framework.on_host:
            self._image = source.image(there[0].begin, there[-1].end)
            self.future = self._image.future
            return
        segments: list[Any] = []
        at = there[0].begin
        for tensor in there:
            if tensor.begin > at:
                segments.append(tensor.begin - at)
            data = framework.empty(tensor.nbytes)
            segments.append(data)
            self._arrays[tensor.name] = data
            at = tensor.end
        self.future = source.file.read_into(segments, there[0].begin)

    def result(self) -> dict[str, Any]:
        """Return the arrays by name, when they are there. To be called once: what is dropped of them is gone."""
        wait(self.future)
        return {tensor.name: self._array(tensor, shape) for tensor, shape in self._shapes.items()}

    def _array(self, tensor: header.Tensor, shape: tuple[int, ...]) -> Any:
        framework = self._framework
        if tensor.nbytes == 0:
            data = framework.empty(0)
        elif self._image is None:
            data = self._arrays.pop(tensor.name)
        else:
            memory = self._image.bytes(tensor.begin, tensor.end, alone=True)
            data = aligned(framework.over(memory), tensor)
        return framework.typed(framework.from_host(data), tensor.dtype, shape)


class Coming(NamedTuple):
    """What is on its way into memory: its transfer, if it needs one, and how to have it when that is done."""

    future: tensorferry.Future[Any] | None
    finish: Callable[[], Any]

    def result(self) -> Any:
        """Wait for it, and return it."""
        wait(self.future)
        return self.finish()


def wait(future: tensorferry.Future[Any] | None) -> None:
    """Return when a transfer, if it is one, has ended well; who is interrupted leaves nothing to be read.

    Raises
    ------
    StorageError
        It could not be read.
    """
    if future is None:
        return
    try:
        future.result()
    except BaseException:
        future.cancel()
        raise


def load_tensor(source: SourceFile, tensor: header.Tensor, framework: Framework) -> Any:
    """Return one tensor of a file."""
    shape = framework.shape(tensor.dtype, tensor.shape, source.path, tensor.name)
    data = begin_bytes(source, tensor, tensor.begin, tensor.end, framework).result()
    return framework.typed(framework.from_host(data), tensor.dtype, shape)


def begin_bytes(
    source: SourceFile, tensor: header.Tensor, begin: int, end: int, framework: Framework
) -> Coming:
    """Begin to have bytes of a tensor where files are read to: mapped if they are in the cache."""
    nbytes = end - begin
    if framework.on_host and nbytes > 0 and source.is_mapped(begin, end):
        mapped = aligned(framework.over(source.map(begin, end)), tensor)
        return Coming(None, lambda: mapped)
    if framework.on_host and nbytes >= _SMALL_NBYTES:
        image = source.image(begin, end)
        return Coming(
            image.future,
            lambda: aligned(framework.over(image.bytes(begin, end)), tensor),
        )
    data = framework.empty(nbytes)
    future = source.file.read_into(data, begin) if nbytes > 0 else None
    return Coming(future, lambda: data)


def aligned(data: Any, tensor: header.Tensor) -> Any:
    """Return a tensor's bytes, or a copy where its elements do not lie as processors want them.

    The format lets a tensor begin anywhere; images have the file's pages.
    """
    if tensor.begin % itemsize_of(tensor.dtype) == 0:
        return data
    return data.clone() if hasattr(data, "clone") else data.copy()


def checked_direct(direct: Any, backend: Any) -> str:
    """Return what is to be read rather than mapped.

    Raises
    ------
    SafetensorError
        There is no such backend.
    ValueError
        ``direct`` is none of those there are.
    """
    if backend not in ("mmap", "pread"):
        raise SafetensorError(f'backend {backend!r} is invalid (expected one of: "mmap", "pread")')
    if direct not in DIRECT:
        raise ValueError(f"direct: {direct!r} is none of {', '.join(map(repr, DIRECT))}")
    # "pread" says that nothing is to be mapped.
    return "always" if backend == "pread" and direct == "auto" else str(direct)


def path_of(filename: Any) -> str:
    """Return a path as text."""
    if not is_pair(filename) and not isinstance(filename, (str, bytes, os.PathLike)):
        raise TypeError(f"filename: {filename!r} is no path")
    return text_of(filename, "filename")
