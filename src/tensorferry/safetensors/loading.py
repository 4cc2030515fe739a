"""An open safetensors file, and its tensors in memory that is mapped or read.

A map copies nothing: its pages are those of the page cache, copy-on-write. Whatever is not in the page cache is read
faster with direct I/O, into memory on huge pages. For single tensors and slices, one of both is chosen for the whole
file, by how much of it the page cache holds. A load of all tensors at once uses both: the cached ranges of the file are
mapped, and the others are read by one pipelined transfer, into one range of addresses, the image. Each tensor owns its
pages of the image: they are freed with its last reference, independently of the other tensors.

A mapped page shows the file's content until the process writes to that page. A program that modifies the file in place
therefore changes tensors, and access to a tensor beyond the end of a truncated file raises SIGBUS. The version of the
file is compared whenever mapped memory is given out. A file that is replaced, where a new file is renamed over it,
keeps its old content in the map.
"""

from __future__ import annotations

import contextlib
import functools
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
from tensorferry.safetensors import header, sources
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import itemsize_of
from tensorferry.safetensors.sources import Stored
from tensorferry.transfer.remote import checked_text
from tensorferry.transfer.versioned import VersionedFile

if TYPE_CHECKING:
    from collections.abc import Iterator

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
# The same for a file of which single tensors and slices are requested: at about a third the kernel's page faults are as
# fast as direct reads, which copy what the cache holds.
_MAPPED_FILE_SHARE = 0.5
# One POSIX_FADV_WILLNEED call reads at most the device's read-ahead or its optimal I/O size, whichever is larger. So
# the advice is given in small pieces.
_ADVICE_NBYTES = 256 << 10


class SourceFile(Owned):
    """An open file with its header. It is thread-safe, and usable in a forked child.

    The file is closed with the last reference, which a handle, a slice or a loader can hold.
    """

    def __init__(self, path: str, direct: str) -> None:
        try:
            self._file = VersionedFile(path, changed=sources.changed)
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

    @property
    def file(self) -> VersionedFile:
        """The file. A forked child gets its own, because the parent's worker threads do not exist in the child."""
        if self.is_parents:
            # This reopens the same file through its descriptor, even if the name now refers to another file. Two
            # threads may do this concurrently: either result is correct. `before` keeps the descriptor open meanwhile.
            before = self._file
            self._file = before._reopen()
            self._set_owner()
        return self._file

    def stored(self, name: str) -> Stored:
        """Return a tensor of the file."""
        return Stored(self.path, self.header.file_nbytes, self.tensor(name), self._file.version)

    def tensor(self, name: str) -> header.Tensor:
        """Return the header's entry of a tensor."""
        found = self.header.tensors.get(name)
        if found is None:
            hint = sources.alias_hint(name, self.header.metadata, self.header.tensors)
            raise SafetensorError(f"File does not contain tensor {name}{hint}", self.path)
        return found

    @functools.cached_property
    def is_mapped(self) -> bool:
        """Whether single tensors and slices are views of a map. It is decided once, so all calls do the same."""
        return self._cached_share(0, self.header.file_nbytes) >= _MAPPED_FILE_SHARE

    def map(self) -> Any:
        """Return a new mapping of the whole file."""
        return _core.map_pieces([self.file._open_file()], [0], [self.header.file_nbytes])

    def image(self, begin: int, end: int) -> Image:
        """Begin to load a range of the file, part mapped and part read."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        file = self.file
        runs = list(self._runs(first, end))
        core = file._open_file()
        sizes = [nbytes for nbytes, _ in runs]
        offsets = list(itertools.accumulate(sizes[:-1], initial=first))
        mapping = _core.map_pieces([core if mapped else None for _, mapped in runs], offsets, sizes)
        file.check()
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


class Image(NamedTuple):
    """A range of a file in memory. It is complete once the future is done."""

    mapping: Any
    begin: int  # the offset in the file
    future: tensorferry.Future[Any] | None  # None if the whole range is mapped

    def bytes(self, begin: int, end: int) -> Any:
        """Return bytes of the file. The result owns its pages, and its last reference frees them."""
        return self.mapping.bytes(begin - self.begin, end - begin, True)


def load_all(source: SourceFile, framework: Framework) -> dict[str, Any]:
    """Load all tensors of a file into host memory, in the order of their offsets."""
    tensors = source.header.tensors
    shapes = [framework.shape(tensor, source.path) for tensor in tensors.values()]
    image: Image | None = None
    if (end := source.header.file_nbytes) > source.header.nbytes:
        image = source.image(source.header.nbytes, end)
        if image.future is not None:
            try:
                image.future.result()
            except BaseException:
                image.future.cancel()
                raise
    arrays = {}
    for (name, tensor), shape in zip(tensors.items(), shapes, strict=True):
        data = framework.empty(0)
        if image is not None and tensor.nbytes > 0:
            data = aligned(framework.wrap(image.bytes(tensor.begin, tensor.end)), tensor, framework)
        arrays[name] = framework.as_array(data, tensor.dtype, shape)
    return arrays


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
    return checked_text(filename, "filename")
