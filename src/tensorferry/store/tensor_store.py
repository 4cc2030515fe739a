"""The public class of the store: it maps names to versions of tensors, and coordinates all other modules."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import os
import pathlib
import stat
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.checks import absolute_path, integer
from tensorferry.base.processes import Owned, when_dropped
from tensorferry.errors import StorageError, first_error
from tensorferry.store import manifest as manifests
from tensorferry.store import transfers
from tensorferry.store.commits import Commits, filled_manifest, not_found
from tensorferry.store.folder import Folder
from tensorferry.store.manifest import Manifest
from tensorferry.store.segments import NO_SPACE, Piece, Segment, StoreDirectory
from tensorferry.store.snapshots import link, unfinished
from tensorferry.store.tensors import CHUNK_NBYTES, TensorInfo, info_of, new_array, resolved
from tensorferry.store.transfers import KeptTensor, StoreFuture
from tensorferry.transfer import publication, runtime
from tensorferry.transfer.arrays import memory_or_segments
from tensorferry.transfer.futures import PendingFutures
from tensorferry.transfer.settings import Settings
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.base.checks import Path
    from tensorferry.transfer.futures import Future

# The files that reserve() makes for tensors of unknown sizes.
_UNKNOWN_NBYTES = 64 << 20
# By default, reserve() makes space for tensors of this total size that are being rewritten.
_IN_FLIGHT_NBYTES = 128 << 20
_SYNCED_AT_ONCE = 64  # files
# A commit needs a few descriptors, for the manifest and for files to sync. They are kept back for the case that the
# program, or the store's own transfers, have taken all others.
_SPARE_DESCRIPTORS = 4
# The free space that a commit needs in addition to the size of its manifest.
_MARGIN_NBYTES = 64 << 10


class TensorStore(Owned):
    """A store of named tensors in files, in one or more directories.

    The store is thread-safe. Any number of transfers may be in progress. It is a context manager.

    Parameters
    ----------
    directories : str, bytes or PathLike, or a list or tuple of these
        The directories of the files, which are created if they do not exist. Several directories should be on different
        drives. Tensors are distributed over them.
    weights : sequence of positive numbers, optional
        The relative share of the bytes for each directory, for drives of different speed. By default all are equal.
    temporary : bool
        If True, the files have no names, and the kernel removes them when the process ends, for any reason. If False,
        the files have names, no other store may write into the directories at the same time, and :meth:`commit` makes
        the tensors permanent.
    checksums : bool
        Whether to compute CRC-32s on writes, and compare them on reads.
    engine : str, optional
        As for :func:`tensorferry.open`. With several directories, each has separate worker threads.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid. Nothing was created.
    StorageError
        A directory cannot be used.
    EngineUnavailableError
        The engine is not available.

    Notes
    -----
    A write creates a new version in its own space. The old version remains until the write has succeeded, and its space
    is then free for the next tensor of this size. A failed write changes nothing. A read returns the data of the last
    write that began before the read, and waits for that write. If the write fails, the read returns the old version.
    A write, too, waits for an earlier write of the same tensor.
    :meth:`commit`, :meth:`snapshot` and :meth:`close` raise the error of a failed write if nobody has retrieved it.

    The store is not reentrant: a signal handler or a finalizer that calls a store while its thread is in a call of the
    same store gets a ``RuntimeError``. Only deleting tensors, and querying names, is allowed there.
    """

    _commits: Commits | None = None  # None for a temporary store
    _refusal = (
        "this store was created before fork() and belongs to the parent process (remedy: create another "
        "store here)"
    )

    def __init__(
        self,
        directories: Path | Sequence[Path],
        *,
        weights: Sequence[float] | None = None,
        temporary: bool = True,
        checksums: bool = True,
        engine: str | None = None,
    ) -> None:
        paths = _checked_directories(directories)
        shares = _checked_weights(weights, len(paths))
        self._set_up(len(paths), bool(checksums), engine)
        try:
            for path in map(pathlib.Path, paths):
                with publication.storage_errors(path, "making a directory for a store"):
                    publication.make_directory(path, sync=not temporary)
            self._add_directories(paths, shares)
            if not temporary:
                self._commits = Commits([one.folder for one in self._directories])
                new_name = _names_of(self._commits.run)
                for directory in self._directories:
                    directory.new_name = new_name
                self._keep_spares()
        except BaseException:
            self._release()
            raise

    @classmethod
    def open(cls, path: Path | Sequence[Path], *, previous: bool = False) -> TensorStore:
        """Open a snapshot, or the last commit of a store, for reading.

        Parameters
        ----------
        path : str, bytes or PathLike, or a list or tuple of these
            The directories of the snapshot or the store: the same number, in the same order, as at its creation.
        previous : bool
            Open the previous commit, which ``commit(keep_previous=True)`` has kept, instead of the last one.

        Raises
        ------
        StorageError
            The store is missing, incomplete or invalid; or the store that made the commit is still open and may
            overwrite it (EBUSY).
        """
        paths = _checked_directories(path)
        store = cls.__new__(cls)
        store._set_up(len(paths), True)
        store._writable = False
        try:
            store._add_directories(paths, [1.0] * len(paths))
            store._open_commit(previous)
        except BaseException:
            store._release()
            raise
        return store

    def _set_up(self, count: int, checksums: bool, engine: str | None = None) -> None:
        # `_lock` guards the tables, and is held for computations only. The other one is held for a whole commit,
        # snapshot or close(). Lock order: _committing, `growing` of a directory, _lock.
        self._lock = threading.RLock()
        self._committing = threading.RLock()
        self._locks = [self._lock, self._committing]  # and `growing` of each directory
        self._set_owner()
        self._checksums = checksums
        self._writable, self._closed = True, False
        self._has_ended = False  # close() has completed
        self._record = b""
        self._names: dict[str, KeptTensor] = {}
        # The writes in progress, the oldest first; the futures of all transfers; and the errors of failed writes.
        self._writing: dict[str, transfers.Write] = {}
        self._pending = PendingFutures()
        self._failed: list[tuple[StorageError, transfers.Outcome]] = []
        self._sweep_at_count = 64  # see _sweep_sometimes()
        self._directories: list[StoreDirectory] = []
        self._spares: list[int] = []
        when_dropped(self, _close_all, self._spares)
        # Invalid settings raise before any directory is made. Several directories have separate workers.
        self._own_schedulers: list[_core.Scheduler] = []
        while engine is not None or count > 1:
            self._own_schedulers.append(runtime.make_scheduler(Settings.of(engine=engine)))
            if len(self._own_schedulers) == count:
                break
        self._schedulers = self._own_schedulers or [runtime.default_scheduler()]

    def _add_directories(self, paths: Sequence[str], weights: Sequence[float]) -> None:
        for at, (path, weight) in enumerate(zip(paths, weights, strict=True)):
            how = (self._schedulers[at], self._lock, weight, self._writable)
            self._directories.append(StoreDirectory(at, Folder(path), *how))
            self._locks.append(self._directories[-1].growing)

    def _open_commit(self, previous: bool) -> None:
        """Find a commit, and add its tensors."""
        folder = self._directories[0].folder
        while True:
            found = manifests.find(folder, previous=previous)
            failure = None
            try:
                if found is None:
                    raise not_found(folder)
                # Before this check, the store that wrote the manifest may have overwritten data, committed again, and
                # ended. Or the first commit of another store has removed the files. Then there is a new manifest now.
                folder.check_no_writer(found[1].run)
                self._add_tensors(found[1])
            except StorageError as error:
                failure = error
            if manifests.find(folder, previous=previous) == found:
                break
        if failure is not None:
            raise failure

    def _add_tensors(self, manifest: Manifest) -> None:
        if (manifest.directories, manifest.directory) != (len(self._directories), 0):
            raise StorageError(
                None,
                f"the store has {manifest.directories} directories (got {len(self._directories)}; remedy: pass all "
                "directories, in the order in which the store was created)",
                self._directories[0].folder.path,
            )
        segments = [
            Segment(self._directories[at], name, None, True) for at, name in manifest.segments
        ]
        self._record = manifest.record
        self._names = {
            name: KeptTensor(info, Piece(segments[number], offset, info.nbytes), chunks)
            for name, (info, number, offset, chunks) in manifest.tensors.items()
        }
        for directory in self._directories:
            directory.segments = {one: None for one in segments if one.directory is directory}
        for segment in segments:
            ends = [at + one.nbytes for at, one in segment.extents.items() if one.nbytes]
            end = max(ends, default=0)
            segment.alone = len(segment.extents) == 1
            path = segment.directory.folder.join(segment.name)
            with publication.storage_errors(path, "opening a segment of a store"):
                status = os.lstat(f"{segment.directory.folder.inner}/{segment.name}")
            if not stat.S_ISREG(status.st_mode) or status.st_size < end:
                message = f"it is not a regular file of at least {end} bytes (the manifest's size)"
                raise StorageError(None, message, path)

    def _release(self, *, patient: bool = True) -> None:
        """Release the schedulers, the locks and all descriptors."""
        for scheduler in self._own_schedulers:
            runtime.close_scheduler(scheduler, patient=patient)
        for directory in self._directories:
            directory.folder.release()
        _close_all(self._spares)

    @property
    def record(self) -> bytes:
        """The record that was passed to the :meth:`commit` or :meth:`snapshot` from which this store was opened."""
        return self._record

    # Tensors

    def write(self, name: str, array: Any) -> Future[Any]:
        """Begin to store an array under a name. It replaces the tensor that was stored under this name.

        Parameters
        ----------
        name : str
            The name, which may be any string.
        array : torch.Tensor, numpy.ndarray, buffer, GPU array, or iterable of these
            The data, as for :func:`tensorferry.write`. Do not change it before the future is done.

        Returns
        -------
        Future
            A future with the array as its result. If the write fails, the old tensor remains.

        Raises
        ------
        ValueError, TypeError
            An argument is invalid. Nothing was written.
        StorageError
            The disk is full (ENOSPC), or a file cannot be created. The old tensor remains.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: {name!r} is not a string")
        self._enter(writing=True)
        array, memory = memory_or_segments(array, writable=False)
        info, future = info_of(array, memory[1]), StoreFuture(array, memory)
        sums = _core.Checksums(CHUNK_NBYTES, False, (), False) if self._checksums else None
        with transfers.named(f"writing tensor {name!r}"):
            piece = self._allocate(memory[1], self._directories)
            file = piece.segment.open()
            request = transfers.submit(file, piece, memory, future, sums, write=True)
        future._start(request, lambda: transfers.moved(memory, file.path, piece.offset))
        future._is_about(True, name, 0, memory[1])
        self._pending.add(future)
        write = transfers.Write(info, request, future, piece, sums)
        while not self._has_begun(name, write):
            self._settle(name, wait=True)
        self._tidy()
        return future

    def _has_begun(self, name: str, write: transfers.Write) -> bool:
        """Note a write, unless another one of this tensor is in progress."""
        with self._lock:
            self._check_open()
            if self._writing.setdefault(name, write) is not write:
                return False
            write.piece.segment.directory.changed_nbytes += write.piece.nbytes
            return True

    def read(self, name: str, out: Any = None) -> Future[Any]:
        """Begin to read the tensor that is stored under a name. If it is being written, first wait for the write.

        Parameters
        ----------
        name : str
            The name of the tensor.
        out : array or list of arrays, optional
            The destination, with exactly the tensor's number of bytes, as for :func:`tensorferry.read`. By default a
            new array of the same kind, dtype and shape as the one that was written: a torch tensor in host memory, a
            NumPy array, or a bytearray for other data.

        Returns
        -------
        Future
            A future with the array as its result.

        Raises
        ------
        KeyError
            No tensor is stored under the name.
        ValueError, TypeError
            An argument is invalid. Nothing was read.
        StorageError
            The file cannot be opened.
        """
        self._enter()
        self._settle(name, wait=True)
        info, piece, chunks = self._names[name]
        if out is None:
            out = new_array(resolved(info))
        out, memory = memory_or_segments(out, writable=True)
        if memory[1] != info.nbytes:
            raise ValueError(
                f"out: tensor {name!r} has {info.nbytes} bytes, and out has {memory[1]}"
            )
        future, sums = StoreFuture(out, memory), None
        if chunks is not None:
            # The caller may not use the memory before the read succeeds, so the data can be verified there.
            sums = _core.Checksums(CHUNK_NBYTES, False, chunks, True)
        if (file := piece.segment.file) is None:
            with transfers.named(f"reading tensor {name!r}"):
                file = piece.segment.open()  # without the lock, because this may be slow
        with self._lock:
            self._check_open()
            request = transfers.submit(file, piece, memory, future, sums, write=False)
            future._start(request, lambda: transfers.moved(memory, file.path, piece.offset))
            self._pending.add(future)
        future._is_about(False, name, 0, memory[1])
        return future

    def delete(self, name: str) -> None:
        """Delete a tensor. Raise KeyError if it does not exist. Reads that have already begun still succeed."""
        self._check_open(writing=True)
        with self._lock:
            self._settle(name)
            if (self._writing.pop(name, None), self._names.pop(name, None)) == (None, None):
                raise KeyError(name)
        if not self._is_reentrant_call():
            self._tidy()

    def info(self, name: str) -> TensorInfo:
        """Return the dtype, shape and size of a tensor, as last written. Raise KeyError if it does not exist."""
        self._check_open()
        with self._lock:
            self._settle(name)
            return resolved((self._writing.get(name) or self._names[name]).info)

    def __contains__(self, name: object) -> bool:
        self._check_open()
        if isinstance(name, str):
            self._settle(name)
        return name in self._names or name in self._writing

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        with self._lock:
            self._sweep()
            return iter(dict.fromkeys([*self._names, *self._writing]))

    def _allocate(
        self, nbytes: int, directories: Sequence[StoreDirectory], *, new: bool = False
    ) -> Piece:
        """Return a piece for a tensor: a free one, unless it must be ``new``. The caller holds no lock."""
        with self._lock:
            self._sweep_sometimes()
            order = sorted(directories, key=lambda one: (one.live_nbytes + nbytes) / one.weight)
            for directory in () if new else order:
                directory.reclaim()
                if piece := directory.take(directory.rounded(nbytes)):
                    return piece
            if piece := order[0].carve(order[0].rounded(nbytes)):
                return piece
        failures = []
        for directory in order:
            try:
                return directory.grow(directory.rounded(nbytes), keep=new)
            except StorageError as error:
                failures.append(error)
        raise failures[0]

    # Space

    def reserve(
        self, nbytes: int | Mapping[str, int], *, in_flight_nbytes: int | None = None
    ) -> None:
        """Allocate space in advance, which reports a full disk now instead of at a later write.

        Parameters
        ----------
        nbytes : int, or mapping of str to int
            The size of each tensor by its name; or the total size, if the sizes are not known. Its space is then in
            files that are removed when tensors of other sizes need it.
        in_flight_nbytes : int, optional
            The maximum size of the tensors that are being rewritten at the same time, where old and new versions both
            need space. By default 128 MiB. The largest tensors get it first, and each of them for a whole version.

        Raises
        ------
        StorageError
            The disk does not have enough space (ENOSPC). The reserved space is unchanged.
        """
        self._enter(writing=True)
        sizes: dict[str | int, int] = {}
        if isinstance(nbytes, Mapping):
            sizes |= {name: integer(size, f"nbytes[{name!r}]", 0) for name, size in nbytes.items()}
        else:
            total = integer(nbytes, "nbytes", 0)
            with self._lock:
                total -= sum(directory.count()[0] for directory in self._directories)
            step = max(_UNKNOWN_NBYTES, total >> 8)
            sizes |= {at: min(step, total - at) for at in range(0, total, step)}
        left = _IN_FLIGHT_NBYTES if in_flight_nbytes is None else in_flight_nbytes
        left = integer(left, "in_flight_nbytes", 0)
        with self._lock:
            self._sweep()
            tensors: dict[Any, Any] = {**self._names, **self._writing}
            wanted = [
                size
                for name, size in sizes.items()
                if name not in tensors or tensors[name].info.nbytes < size
            ]
            for size in sorted(sizes.values(), reverse=True):
                if left <= 0:
                    break
                wanted.append(size)
                left -= size
            missing = Counter(map(self._directories[0].rounded, wanted))
            for directory in self._directories:
                directory.reclaim()
                missing -= directory.free_sizes()
        self._fill(missing, reserve=True)

    def _fill(self, sizes: Counter[int], *, reserve: bool = False) -> None:
        """Make more free pieces, of these sizes, and ``reserve`` all that there are. On failure nothing changes."""
        pieces: list[Piece] = []
        try:
            for size in sorted(sizes.elements(), reverse=True):
                pieces.append(self._allocate(size, self._directories, new=True))
            with self._lock:
                for directory in self._directories:
                    directory.count()
                    there = directory.live_nbytes + directory.free_nbytes if reserve else 0
                    directory.reserved_nbytes = max(directory.reserved_nbytes, there)
        except BaseException:
            made = [(piece.segment.directory, piece.nbytes) for piece in pieces]
            pieces.clear()
            for directory, nbytes in made:
                directory.shrink(nbytes)
            raise

    # Mappings, snapshots and commits

    def map(self, ranges: Iterable[tuple[str, int, int]]) -> Any:
        """Map ranges of tensors to contiguous memory, which is read from the drive on first access.

        The memory keeps the tensors' current values, whatever is written later, even after the store is closed. Changes
        to the memory are private and are not written to the files. The call waits for writes of these tensors that are
        in progress. Checksums are not compared. As with every mapping, access to a page that the drive cannot read
        raises SIGBUS.

        Parameters
        ----------
        ranges : iterable of (name, offset, nbytes)
            The ranges. Offsets must be multiples of the page size (``mmap.PAGESIZE``), and so must all sizes except the
            last one.

        Returns
        -------
        buffer
            Writable bytes for ``torch.frombuffer`` and ``numpy.frombuffer``. The space of the tensors is not reused
            while a view of the buffer exists.

        Raises
        ------
        KeyError
            No tensor is stored under a name.
        ValueError, TypeError
            A range is invalid.
        StorageError
            The files cannot be mapped.
        """
        self._enter()
        pieces: list[Piece] = []
        places: list[tuple[_core.File, int, int]] = []  # with the offset in the file, and the size
        for name, offset, nbytes in ranges:
            if places and places[-1][2] % mmap.PAGESIZE != 0:
                raise ValueError(
                    f"ranges: every size except the last must be a multiple of {mmap.PAGESIZE} (got {places[-1][2]})"
                )
            self._settle(name, wait=True)
            info, piece, _ = self._names[name]
            offset = integer(offset, "offset", 0)
            nbytes = integer(nbytes, "nbytes", 0)
            end, whole = offset + nbytes, info.nbytes
            if offset % mmap.PAGESIZE != 0 or nbytes == 0 or end > whole:
                raise ValueError(
                    f"ranges: cannot map {nbytes} bytes at offset {offset} of tensor {name!r}, which has {whole} bytes "
                    f"(offsets must be multiples of {mmap.PAGESIZE})"
                )
            pieces.append(piece)
            places.append((piece.segment.open(), piece.offset + offset, nbytes))
        if not places:
            raise ValueError("ranges: the iterable is empty")
        with self._lock:  # keeps close() from closing the files during the call
            self._check_open()
            files, offsets, sizes = zip(*places, strict=True)
            return _core.map_pieces(files, offsets, sizes, pieces).bytes(0, sum(sizes))

    def snapshot(self, path: Path | Sequence[Path], record: bytes = b"") -> None:
        """Save the current tensors to a new directory, for :meth:`open`. This waits for writes that are in progress.

        On the same file system no data is copied: the snapshot consists of hard links or reflinks, and the store
        continues in new files, which this call allocates. The snapshot is durable when the call returns.
        If the call fails, or the process is killed, no directory with this name exists.

        Parameters
        ----------
        path : str, bytes or PathLike, or a list or tuple of these
            The directory of the snapshot, which must not exist. For a store with several directories, either one path,
            or one path for each of them, on the same file system.
        record : bytes
            Data to store with the snapshot, available as :attr:`record` after :meth:`open`.

        Raises
        ------
        StorageError
            The path exists (EEXIST), the disk is full, or a file cannot be read or written.
        """
        self._enter(writing=True)
        paths = _checked_directories(path, "path")
        if len(paths) not in (1, len(self._directories)):
            raise ValueError(
                f"path: expected one path, or one for each of the {len(self._directories)} directories of the store "
                f"(got {len(paths)} paths)"
            )
        with self._committing:
            self._tidy()
            tensors = self._written(record)
            run = os.urandom(8).hex()
            with unfinished(paths, run) as folders:
                self._fill_snapshot(tensors, record, folders, run)
        del tensors
        self._tidy(with_frozen=True)

    def _fill_snapshot(
        self, tensors: dict[str, KeptTensor], record: bytes, folders: Sequence[Folder], run: str
    ) -> None:
        """Link to the segments that are mostly in use, copy the tensors in others, and write the manifest."""
        new_name = _names_of(run)
        places: dict[Segment, tuple[int, str]] = {}
        used: Counter[Segment] = Counter()
        for kept in tensors.values():
            used[kept.piece.segment] += kept.piece.nbytes
        for segment in used:
            at = segment.directory.number if len(folders) > 1 else 0
            is_due = 2 * used[segment] >= segment.nbytes and not segment.sync_failed
            if is_due and link(segment, folders[at], name := new_name()):
                segment.frozen, places[segment] = True, (at, name)
        self._sync(places)
        targets = [
            StoreDirectory(at, folder, self._schedulers[at], self._lock, new_name=new_name)
            for at, folder in enumerate(folders)
        ]
        others = {name: one for name, one in tensors.items() if one.piece.segment not in places}
        try:
            copied = self._copy(others, targets)
            for target in targets:
                self._sync(target.segments)
                places |= {one: (target.number, one.name) for one in target.segments}
        finally:
            failures = [error for target in targets for error in target.close()]
        if failures:
            raise first_error(failures, "files")
        manifest = filled_manifest(
            Manifest(run, run, len(folders)), record, tensors | copied, places
        )
        folders[0].write(manifests.name_of(1), manifests.to_bytes(manifest), sync=True)
        # The store reserves as much space as before.
        with self._lock:
            reserving = [one for one in places if one.directory.reserved_nbytes]
            sizes = [each.nbytes for one in reserving for each in one.extents.values()]
        self._fill(Counter(sizes))
        with self._lock:
            for directory in self._directories:
                directory.purge()

    def _copy(
        self, tensors: Mapping[str, KeptTensor], directories: Sequence[StoreDirectory]
    ) -> dict[str, KeptTensor]:
        """Copy tensors to new pieces, and compare their checksums."""
        copies: dict[str, KeptTensor] = {}
        items: dict[Segment, list[tuple[str, KeptTensor, Piece]]] = {}
        for name, kept in sorted(tensors.items(), key=lambda one: one[1].piece.offset):
            piece = self._allocate(kept.info.nbytes, directories)
            copies[name] = kept._replace(piece=piece)
            items.setdefault(kept.piece.segment, []).append((name, kept, piece))
        for each in items.values():
            transfers.copy_pieces(each)
        return copies

    def _rewrite(self, segments: Sequence[Segment]) -> None:
        """Copy all current tensors out of segments, if checksums can show that their data are intact."""
        with self._lock:
            for segment in segments:
                segment.frozen = True
            for directory in self._directories:
                directory.purge()
            moving = {
                name: one
                for name, one in self._names.copy().items()
                if one.piece.segment in segments
            }
        for name, copied in self._copy(moving, self._directories).items():
            with self._lock:
                if self._names.get(name) is moving[name]:
                    self._names[name] = copied

    def commit(
        self, record: bytes = b"", sync: bool = False, *, keep_previous: bool = False
    ) -> None:
        """Commit the current tensors: :meth:`open` then finds them, however this process ends, until the next commit.

        This needs ``temporary=False``. It waits for writes that are in progress. A commit atomically replaces the last
        commit. The data of the last commit is not overwritten before that, so the disk needs space for both. A commit
        without ``sync`` replaces even a last commit that was made with ``sync``; after a power cut, both may be lost.

        Parameters
        ----------
        record : bytes
            Data to store with the commit, available as :attr:`record` after :meth:`open`.
        sync : bool
            Whether the commit survives a power cut. If an earlier sync failed, the tensors concerned are first copied
            to other files, one at a time, and verified by their checksums.
        keep_previous : bool
            Whether to keep the last commit for ``open(previous=True)``, until :meth:`drop_previous` or the next commit.
            If processes with one store each commit one after the other, and are killed in between, only some have the
            new commit. With ``keep_previous``, all of them can return to the previous commit.

        Raises
        ------
        ValueError
            The store is temporary.
        StorageError
            The commit failed. The directory has either the earlier commit or this one. After a failed sync, commits of
            a store without checksums fail until the tensors in the file concerned have been written again.
        """
        self._enter(writing=True)
        if self._commits is None:
            raise ValueError(
                "commit: the files of a temporary store have no names (remedy: temporary=False, or snapshot())"
            )
        with self._committing:
            _close_all(self._spares)
            try:
                tensors = self._written(record)
                self._publish(self._commits, tensors, record, (sync, keep_previous))
            finally:
                self._keep_spares()
            for directory in self._directories:
                directory.earlier_nbytes, directory.changed_nbytes = directory.changed_nbytes, 0
        del tensors
        self._tidy(with_frozen=True)

    def _publish(
        self,
        commits: Commits,
        tensors: dict[str, KeptTensor],
        record: bytes,
        how: tuple[bool, bool],
    ) -> None:
        segments = {one.piece.segment for one in tensors.values()}
        places = {one: (one.directory.number, one.name) for one in segments}
        for directory in self._directories:
            directory.folder.check_names(
                {one.name for one in segments if one.directory is directory}
            )
        if how[0]:
            self._sync(segments)
            for directory in reversed(self._directories):
                directory.sync_names()
        manifest = filled_manifest(commits.empty, record, tensors, places)
        try:
            commits.publish(manifest, tensors, *how)
        except StorageError as error:
            # reserve() makes no space for manifests.
            needed = 256 * len(tensors) + len(record) + _MARGIN_NBYTES
            if error.errno not in NO_SPACE or not self._directories[0].shrink(needed):
                raise
            commits.publish(manifest, tensors, *how)

    def _keep_spares(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spares) < _SPARE_DESCRIPTORS:
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def drop_previous(self) -> None:
        """Drop the previous commit, if it is kept, and free its space.

        Raises
        ------
        StorageError
            The manifest of the previous commit cannot be removed.
        """
        # Refuse a closed store: the files in its directories may belong to another store now.
        self._enter(writing=True)
        with self._committing:
            self._check_open()
            if self._commits is not None:
                self._commits.drop({self._commits.last}, durably=True)
        self._tidy()

    def go_back(self) -> None:
        """Make the previous commit the last one again, in place of the commit that followed it.

        Both commits must be those of an earlier store in these directories: this store must not have committed.

        Raises
        ------
        ValueError
            The store has committed, or is temporary, closed or read-only.
        StorageError
            The previous commit is not kept, or its manifest cannot be renamed.
        """
        self._enter(writing=True)
        with self._committing:
            self._check_open()
            if self._commits is None or self._commits.has_committed:
                what = "is temporary" if self._commits is None else "has committed"
                raise ValueError(
                    f"go_back: this store {what}, and only a commit of an earlier store can be undone"
                )
            self._commits.go_back()

    def _sync(self, segments: Iterable[Segment]) -> None:
        """Make segments durable. Raise the first error."""
        due = [one for one in segments if one.synced != one.written]
        failures: list[StorageError] = []
        for directory in dict.fromkeys(one.directory for one in due):
            part = [one for one in due if one.directory is directory]
            for at in range(0, len(part), _SYNCED_AT_ONCE):
                failures += directory.sync(part[at : at + _SYNCED_AT_ONCE])
        with self._lock:
            for directory in self._directories if failures else ():
                directory.purge()
        if failures:
            raise first_error(failures, "files")

    def _written(self, record: bytes) -> dict[str, KeptTensor]:
        """Wait for all writes in progress, and return the tensors, of which none is in a file whose sync has failed.

        Raises
        ------
        StorageError
            A write has failed, and nobody has retrieved its error.
        """
        if not isinstance(record, bytes):
            raise TypeError(f"record: {type(record).__name__} is not bytes")
        for name in list(self._writing):
            self._settle(name, wait=True)
        with self._lock:
            self._check_open()
            self._sweep()
            self._raise_failure()
        failed = [one for each in self._directories for one in each.segments if one.sync_failed]
        if failed and self._checksums:
            self._rewrite(failed)
        with self._lock:
            return self._names.copy()

    def _raise_failure(self) -> None:
        """Raise the error of the first failed write of which nobody knows, once."""
        failures = [error for error, outcome in self._failed if not outcome.retrieved]
        self._failed.clear()
        if failures:
            raise first_error(failures, "writes")

    def stats(self) -> dict[str, Any]:
        """Return the number of tensors and of transfers in progress, and the space of each directory.

        ``workers`` has the counters of the worker threads, as in :meth:`tensorferry.File.stats`.
        """
        self._enter()
        self._tidy()
        with self._lock:
            self._sweep()
            return {
                "tensors": len({*self._names, *self._writing}),
                "in_flight": sum(not one.done() for one in self._pending.alive()),
                "directories": [directory.stats() for directory in self._directories],
                "workers": summed_stats([scheduler.stats() for scheduler in self._schedulers]),
            }

    # Closing

    @property
    def closed(self) -> bool:
        """Whether the store has been closed."""
        return self._closed

    def close(self) -> None:
        """Wait for transfers in progress, and close the store. Futures keep their results and errors.

        If there is no progress for 60 seconds, the wait ends with a ``RuntimeWarning``, and the arrays of the remaining
        transfers stay in memory.

        Raises
        ------
        StorageError
            A write has failed, and nobody has retrieved its error; or a file system reports only now that data were
            lost. The store is closed nevertheless.
        """
        if self.is_parents:
            self._closed = True  # the files and the locks belong to the parent process
            return
        self._refuse_reentrant_call()
        with self._committing:
            if self._has_ended:
                return
            with self._lock:
                self._closed = True
                for directory in self._directories:
                    directory.closed = True
            timed_out = not self._finish()  # after Ctrl-C, close() can be called again
            failures = [] if timed_out else self._close_files()
            with self._lock:
                self._names.clear()
                self._writing.clear()
            self._release(patient=not timed_out)
            self._has_ended = True
            if timed_out and not self._own_schedulers:
                runtime.warn_of_abandoned_io(f"outstanding transfers of {self!r}")
        self._raise_failure()
        if failures:
            raise first_error(failures, "files")

    def _finish(self) -> bool:
        """Wait for all transfers. Return False if the wait was given up for lack of progress."""
        futures = self._pending.alive()
        waits: list[Callable[[float], bool]] = [one._request.wait for one in futures]
        waits += [
            one.file.retire for each in self._directories for one in each.segments if one.file
        ]
        ended = all(runtime.wait_while_progressing(wait, *self._schedulers) for wait in waits)
        for future in futures:
            future.done()  # checks now that the array still has its memory
        with self._lock:
            self._sweep()
        return ended

    def _close_files(self) -> list[StorageError]:
        """Close all files, and remove those that belong to no commit. Return the errors."""
        remove = self._commits is None and self._writable
        failures = [error for one in self._directories for error in one.close(remove=remove)]
        if self._commits is not None:
            self._commits.remove_leftovers(None)
        return failures

    def __enter__(self) -> TensorStore:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        return f"<{state}tensorferry.store.TensorStore {[one.folder.path for one in self._directories]!r}>"

    # Writes that have ended

    def _settle(self, name: str, *, wait: bool = False) -> None:
        """Update the tables if the write of a tensor has ended. If this is interrupted, the next call repeats it."""
        if (write := self._writing.get(name)) is None:
            return
        if wait:
            write.request.wait(None)
        if not write.request.done():
            return
        with self._lock:
            if self._writing.get(name) is not write:
                return
            if (error := write.future._settle()) is None:
                write.piece.segment.written += 1
                self._names[name] = write.kept()
                if self._writing.pop(name, None) is not write:
                    self._names.pop(name, None)  # a finalizer has deleted the tensor meanwhile
                return
            if error.errno != errno.ECANCELED:
                error = transfers.with_context(error, f"writing tensor {name!r}")
                self._failed.append((error, write.future.outcome))
            self._writing.pop(name, None)

    def _sweep_sometimes(self) -> None:
        """Settle the writes that have ended: the oldest ones, and others only if there are many.

        Between two complete checks, the number of writes doubles. So the cost of these checks is constant for each
        write on average.
        """
        while (name := next(iter(self._writing), None)) is not None:
            self._settle(name)
            if name in self._writing:
                break
        if len(self._writing) >= self._sweep_at_count:
            self._sweep()
            self._sweep_at_count = 2 * len(self._writing) + 64

    def _sweep(self) -> None:
        """Settle all writes that have ended."""
        for name in list(self._writing):
            self._settle(name)

    # Checks

    def _tidy(self, *, with_frozen: bool = False) -> None:
        """Free space. ``with_frozen``, which takes longer, also that of files that snapshots had."""
        for directory in self._directories:
            with self._lock:
                directory.reclaim()
            if segments := directory.tidy(with_frozen=with_frozen):
                with contextlib.suppress(StorageError):  # reads report damaged data
                    self._rewrite(segments)

    def _enter(self, *, writing: bool = False) -> None:
        """Check the state of the store at the start of a call that uses more than the table of names."""
        self._check_open(writing=writing)
        self._refuse_reentrant_call()

    def _refuse_reentrant_call(self) -> None:
        """Raise RuntimeError if this thread is already in a call of the store.

        The locks are reentrant and would not stop such a call, but the tables may be inconsistent in the middle of the
        outer call.
        """
        if self._is_reentrant_call():
            raise RuntimeError(
                "this thread is in the middle of another call of this store, and TensorStore is not reentrant (likely "
                "cause: a signal handler or a finalizer calls it; remedy: defer the call)"
            )

    def _is_reentrant_call(self) -> bool:
        return any(lock._is_owned() for lock in self._locks)  # type: ignore[attr-defined]

    def _check_open(self, *, writing: bool = False) -> None:
        self._check_process()
        if self._closed:
            raise ValueError(
                f"the store {[one.folder.path for one in self._directories]!r} is closed"
            )
        if writing and not self._writable:
            raise ValueError("the store was opened for reading only (remedy: write to a new store)")


def _names_of(run: str) -> Callable[[], str]:
    """Return a function that returns new names of segments."""
    count = itertools.count()
    return lambda: f"tensorferry-store-{run}-{next(count)}.segment"


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _checked_directories(
    directories: Path | Sequence[Path], argument: str = "directories"
) -> list[str]:
    several = directories if isinstance(directories, (list, tuple)) else [directories]
    paths = [absolute_path(path, f"{argument}[{at}]") for at, path in enumerate(several)]
    if not paths:
        raise ValueError(f"{argument}: at least one is needed, and the list is empty")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ValueError(f"{argument}: one directory is given twice (got {paths!r})")
    if len(paths) > manifests.MAX_DIRECTORIES:
        raise ValueError(
            f"{argument}: {len(paths)} are more than the limit of {manifests.MAX_DIRECTORIES}"
        )
    return paths


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    shares = [float(weight) for weight in weights]
    if len(shares) != count or not all(0 < share < math.inf for share in shares):
        raise ValueError(f"weights: expected {count} positive numbers (got {weights!r})")
    return shares
