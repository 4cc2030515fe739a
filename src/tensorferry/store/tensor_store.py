"""The public class of the store: it maps names to versions of tensors, and coordinates all other modules."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pathlib
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tensorferry import _core
from tensorferry.base.checks import absolute_path, direct_mode, integer
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError
from tensorferry.store import compaction
from tensorferry.store import manifest as manifests
from tensorferry.store.allocator import SegmentAllocator
from tensorferry.store.contents import KeptTensor, StoreContents, last_kept, open_stored
from tensorferry.store.folder import (
    check,
    make_directory,
    mark_parts,
    read_previous,
    remove,
    remove_others,
    remove_own,
    rename,
    replace,
    sync_directory,
    write_temporary,
)
from tensorferry.store.manifest import StoredSegment
from tensorferry.store.ownership import Ownership
from tensorferry.store.segments import (
    GRANULARITY,
    NO_SPACE,
    StoreDirectory,
    make_durable,
    parts_of,
)
from tensorferry.store.snapshots import UnfinishedSnapshot
from tensorferry.store.tensors import TensorInfo, info_of, new_array
from tensorferry.store.transfers import Read, TensorVersion, Transfer, Write, with_context
from tensorferry.transfer.arrays import memory_or_segments
from tensorferry.transfer.files import in_background, scheduler_for_settings
from tensorferry.transfer.futures import Future
from tensorferry.transfer.publication import check_renames
from tensorferry.transfer.runtime import (
    close_scheduler,
    default_scheduler,
    make_scheduler,
    wait_while_progressing,
    warn_of_abandoned_io,
)
from tensorferry.transfer.settings import Settings
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.base.checks import Direct, Path
    from tensorferry.store.segments import Piece, Segment
    from tensorferry.transfer.files import Priority

_Result = TypeVar("_Result")

DEFAULT_SEGMENT_NBYTES = 64 << 20
MAX_SEGMENT_NBYTES = 1 << 40


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
    segment_nbytes : int
        The size of the files, a multiple of 4096, and the maximum size of one piece of a tensor. After 32 files in a
        directory, the next ones are twice as large, because each file costs one or two descriptors.
    temporary : bool
        If True, the files have no names, and the kernel removes them when the process ends, for any reason. If False,
        the files have names, no other store may write into the directories at the same time, and :meth:`commit` makes
        the tensors permanent.
    checksums : bool
        Whether to compute CRC-32s on writes, and compare them on reads.
    direct : "auto", True or False
        As for :func:`tensorferry.read` and :func:`tensorferry.write`.
    engine, block_size, queue_depth
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
    A write creates a new version in newly allocated space. The old version remains until the write has succeeded, and
    its space is then freed. A failed write changes nothing. A read returns the data of the last write that began before
    the read, and waits for that write. If the write fails, the read returns the old version.

    The store is not reentrant: a signal handler or a finalizer that calls a store while its thread is in a call of the
    same store gets a ``RuntimeError``. Only deleting tensors, and querying names, is allowed there.
    """

    _refusal = (
        "this store was created before fork() and belongs to the parent process (remedy: create another "
        "store here)"
    )

    def __init__(
        self,
        directories: Path | Sequence[Path],
        *,
        weights: Sequence[float] | None = None,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
        temporary: bool = True,
        checksums: bool = True,
        direct: Direct = "auto",
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        paths = _checked_directories(directories)
        shares = _checked_weights(weights, len(paths))
        self._set_up(
            bool(checksums),
            integer(segment_nbytes, "segment_nbytes", 1, MAX_SEGMENT_NBYTES, GRANULARITY),
        )
        mode = direct_mode(direct)
        try:
            # Invalid settings raise before any directory is made.
            schedulers = [
                self._new_scheduler(len(paths), engine, block_size, queue_depth) for _ in paths
            ]
            for path in paths:
                self._made_in += make_directory(path)
            if not temporary:
                self._take_ownership(paths)
            for at, (path, share, scheduler) in enumerate(
                zip(paths, shares, schedulers, strict=True)
            ):
                prefix = None if temporary else manifests.segment_prefix(self._run, at)
                self._directories.append(
                    StoreDirectory(
                        *(path, share, scheduler),
                        direct=mode,
                        segment_nbytes=segment_nbytes,
                        prefix=prefix,
                    )
                )
        except BaseException:
            self._release_resources()
            raise

    @classmethod
    def open(
        cls,
        path: Path | Sequence[Path],
        *,
        previous: bool = False,
        direct: Direct = "auto",
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> TensorStore:
        """Open a snapshot, or the last commit of a store, for reading.

        Parameters
        ----------
        path : str, bytes or PathLike, or a list or tuple of these
            The directories of the snapshot or the store: the same number, in the same order, as at its creation.
        previous : bool
            Open the previous commit, which ``commit(keep_previous=True)`` has kept, instead of the last one.
        direct, engine, block_size, queue_depth
            As for the constructor.

        Raises
        ------
        StorageError
            The store is missing, incomplete or invalid; or the store that made the commit is still open and may
            overwrite it (EBUSY).
        """
        paths = _checked_directories(path)
        mode = direct_mode(direct)
        store = cls.__new__(cls)
        store._set_up(True, DEFAULT_SEGMENT_NBYTES)
        store._writable = False
        try:
            schedulers = [
                store._new_scheduler(len(paths), engine, block_size, queue_depth) for _ in paths
            ]
            store._record, store._names = open_stored(
                *(paths, schedulers, mode, store._allocator), previous=previous
            )
        except BaseException:
            store._release_resources()
            raise
        return store

    def _set_up(self, checksums: bool, segment_nbytes: int) -> None:
        # `_lock` guards the tables, and is held for computations only. The other locks are held for a whole close(), a
        # whole compaction, and a whole commit or snapshot. Lock order: _closing, _compacting, _committing, _lock.
        self._lock = threading.RLock()
        self._closing = threading.RLock()
        self._compacting = threading.RLock()
        self._committing = threading.RLock()
        self._set_owner()
        self._checksums = checksums
        self._segment_nbytes = segment_nbytes
        self._writable = True
        self._closed = False
        self._has_ended = False  # close() has completed
        self._record = b""
        self._run = manifests.new_run()
        self._names: dict[str, TensorVersion] = {}
        self._allocator = SegmentAllocator(self._lock, segment_nbytes, self._sweep)
        self._pending: dict[
            Transfer, None
        ] = {}  # an ordered set: transfers in the order in which they began
        self._sweep_at_count = 64  # see _sweep_sometimes()
        self._written_nbytes = self._read_nbytes = self._moved_nbytes = 0
        self._directories = self._allocator.directories
        self._made_in: list[str] = []  # directories with new names that may not be durable yet
        self._own_schedulers: list[_core.Scheduler] = []
        self._ownerships: list[Ownership] | None = None  # None for a temporary store
        # The contents that the manifest names, or may name after a failed commit. Their pieces must not be overwritten.
        self._committed: list[StoreContents] = []
        # The contents that the manifest of the previous commit names.
        self._previous: list[StoreContents] = []
        # Whether a manifest of a previous commit exists, possibly of another run (an earlier store object).
        self._has_previous = False
        self._committed_sync = False  # whether the last commit of this run was made with sync=True
        self._has_committed = False  # if False, a manifest in the directory is of another run
        self._mapped: weakref.WeakSet[_Mapping] = weakref.WeakSet()
        self._compactor: threading.Thread | None = None
        self._ending = threading.Event()  # set by close(): compaction stops

    def _take_ownership(self, paths: list[str]) -> None:
        """Lock the directories for this store, and remove files that killed processes have left."""
        self._ownerships = []
        for path in paths:
            self._ownerships.append(Ownership(path, self._run))
        # A commit needs a rename that replaces a file. Report now if the file system does not support it.
        check_renames(pathlib.Path(paths[0]), replaced=True)
        committed = check(paths)
        self._has_previous = len(committed) > 1
        remove_others(paths, self._run, committed)

    def _new_scheduler(
        self, count: int, engine: str | None, block_size: int | None, queue_depth: int | None
    ) -> _core.Scheduler:
        own: _core.Scheduler | None = scheduler_for_settings(engine, block_size, queue_depth)
        if own is None:
            if count == 1:
                return default_scheduler()
            own = make_scheduler(Settings.of())
        self._own_schedulers.append(own)
        return own

    def _release_resources(self, *, patient: bool = True) -> None:
        """Release the schedulers and the locks."""
        for scheduler in self._own_schedulers:
            close_scheduler(scheduler, patient=patient)
        for ownership in self._ownerships or ():
            ownership.release()

    @property
    def record(self) -> bytes:
        """The record that was passed to the :meth:`commit` or :meth:`snapshot` from which this store was opened."""
        return self._record

    # Tensors

    def write(self, name: str, array: Any, priority: Priority = "normal") -> Future[Any]:
        """Begin to store an array under a name. It replaces the tensor that was stored under this name.

        Parameters
        ----------
        name : str
            The name, which may be any string.
        array : torch.Tensor, numpy.ndarray, buffer, GPU array, or iterable of these
            The data, as for :func:`tensorferry.write`. Do not change it before the future is done.
        priority : "normal" or "background"
            As for :func:`tensorferry.write`.

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
        background = in_background(priority)
        self._enter(writing=True)
        array, memory = memory_or_segments(array, writable=False)
        info = info_of(array, memory[1])
        ticket: Future[Any] = Future(array, memory)
        with self._lock:
            self._sweep_sometimes()
        try:
            pieces = self._with_space(lambda: self._allocator.allocate(info.nbytes))
        except StorageError as error:
            raise with_context([error], f"writing tensor {name!r}") from None
        with self._lock:
            self._check_open()
            version = TensorVersion(info, pieces, self._names.get(name))
            transfer = Write(self, name, memory, version, background=background, owner=ticket)
            version.write = transfer
            self._names[name] = version
            self._pending[transfer] = None
            self._written_nbytes += info.nbytes
            ticket._start(transfer)
        self._compact_soon()
        ticket._is_about(True, name, 0, info.nbytes)
        return ticket

    def read(self, name: str, out: Any = None, priority: Priority = "normal") -> Future[Any]:
        """Begin to read the tensor that is stored under a name.

        Parameters
        ----------
        name : str
            The name of the tensor.
        out : array or list of arrays, optional
            The destination, with exactly the tensor's number of bytes, as for :func:`tensorferry.read`. By default a
            new array of the same kind, dtype and shape as the one that was written: a torch tensor in host memory, a
            NumPy array, or a bytearray for other data.
        priority : "normal" or "background"
            As for :func:`tensorferry.read`.

        Returns
        -------
        Future
            A future with the array as its result.

        Raises
        ------
        KeyError
            No tensor is stored under the name, and none is being written.
        ValueError, TypeError
            An argument is invalid. Nothing was read.
        """
        background = in_background(priority)
        self._enter()
        with self._lock:
            version = self._version_of(name)
        info = version.info
        is_new = out is None
        if is_new:
            out = new_array(info)
        out, memory = memory_or_segments(out, writable=True)
        if memory[1] != info.nbytes:
            raise ValueError(
                f"out: tensor {name!r} has {info.nbytes} bytes, and out has {memory[1]}"
            )
        ticket: Future[Any] = Future(out, memory)
        with self._lock:
            self._check_open()
            self._sweep_sometimes()
            transfer = Read(
                *(self, name, memory, version, info if is_new else None),
                background=background,
                owner=ticket,
            )
            self._pending[transfer] = None
            self._read_nbytes += info.nbytes
            ticket._start(transfer)
        ticket._is_about(False, name, 0, info.nbytes)
        return ticket

    def delete(self, name: str) -> None:
        """Delete a tensor. Raise KeyError if it does not exist. Reads that have already begun still succeed."""
        self._check_open(writing=True)
        with self._lock:
            self._version_of(name)
            self._names.pop(name, None)
        if not self._is_reentrant_call():
            self._compact_soon()

    def info(self, name: str) -> TensorInfo:
        """Return the dtype, shape and size of a tensor, as last written. Raise KeyError if it does not exist."""
        self._check_open()
        with self._lock:
            return self._version_of(name).info

    def __contains__(self, name: object) -> bool:
        self._check_open()
        with self._lock:
            return isinstance(name, str) and self._current(name) is not None

    def __len__(self) -> int:
        self._check_open()
        with self._lock:
            self._sweep()
            return len(self._names)

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        with self._lock:
            self._sweep()
            return iter(list(self._names))

    # Space

    def reserve(
        self, nbytes: int | Mapping[str, int], *, in_flight_nbytes: int | None = None
    ) -> None:
        """Allocate space in advance, which reports a full disk now instead of at a later write.

        Parameters
        ----------
        nbytes : int, or mapping of str to int
            The total size of all tensors, including those that are already stored; or, more precisely, the size of each
            tensor by its name.
        in_flight_nbytes : int, optional
            The maximum size of the tensors that are being rewritten at the same time, where old and new versions both
            need space. By default two segments for each directory, or the size of the largest tensor if that is larger.

        Raises
        ------
        StorageError
            The disk does not have enough space (ENOSPC). The reserved space is unchanged.
        """
        self._enter(writing=True)
        sizes: dict[str, int] | None = None
        if isinstance(nbytes, Mapping):
            sizes = {name: integer(size, f"nbytes[{name!r}]", 0) for name, size in nbytes.items()}
            total, largest = (
                sum(map(self._allocator.rounded, sizes.values())),
                max(sizes.values(), default=0),
            )
        else:
            total = largest = integer(nbytes, "nbytes", 0)
            largest = min(largest, self._segment_nbytes)
        if in_flight_nbytes is None:
            slack = max(2 * self._segment_nbytes * len(self._directories), largest)
            in_flight_nbytes = min(slack, total)
        slack = integer(in_flight_nbytes, "in_flight_nbytes", 0)
        self._allocator.reclaim()
        with self._lock:
            self._check_open()
            self._sweep()
            if sizes is None:
                used = sum(directory.used_nbytes for directory in self._directories)
                missing = [max(total - used, 0)]
            else:
                missing = [
                    size
                    for name, size in sizes.items()
                    if name not in self._names or self._names[name].info.nbytes < size
                ]
        self._with_space(lambda: self._allocator.reserve([*missing, slack]))

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
        files: list[_core.File] = []
        offsets: list[int] = []
        sizes: list[int] = []
        kept: list[Piece] = []
        for name, offset, nbytes in ranges:
            if sizes and sizes[-1] % mmap.PAGESIZE != 0:
                raise ValueError(
                    f"ranges: every size except the last must be a multiple of {mmap.PAGESIZE} (got {sizes[-1]})"
                )
            pieces, info = self._wait_for_pieces(name)
            offset = integer(offset, "offset", 0)
            nbytes = integer(nbytes, "nbytes", 0)
            if offset % mmap.PAGESIZE != 0 or nbytes == 0 or offset + nbytes > info.nbytes:
                raise ValueError(
                    f"ranges: cannot map {nbytes} bytes at offset {offset} of tensor {name!r}, which has {info.nbytes} "
                    f"bytes (offsets must be multiples of {mmap.PAGESIZE})"
                )
            for piece, begin, end in parts_of(pieces, offset, offset + nbytes):
                files.append(piece.segment.file)
                offsets.append(piece.offset + begin)
                sizes.append(end - begin)
                kept.append(piece)
        if not files:
            raise ValueError("ranges: the iterable is empty")
        with self._lock:  # keeps close() from closing the files during the call
            self._check_open()
            mapped = _Mapping(kept)
            self._mapped.add(mapped)
            return _core.map_pieces(files, offsets, sizes, mapped).bytes(0, sum(sizes))

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
            contents = self._contents(record)
            # After a failed sync, data may be lost. With checksums, the copy below detects lost data. Without
            # checksums, another sync raises the error.
            if not self._checksums:
                self._sync([segment for segment in contents.segments if segment.sync_failed])
            partial = UnfinishedSnapshot(paths, self._run)
            try:
                frozen: list[Segment] = []
                segments: list[StoredSegment] = []
                for number, segment in enumerate(contents.segments):
                    at = self._directories.index(segment.directory) if len(paths) > 1 else 0
                    name = f"{manifests.segment_prefix(self._run, at)}{number}.segment"
                    segments.append(StoredSegment(at, name, segment.nbytes))
                    if not segment.sync_failed and partial.link(segment, at, name):
                        frozen.append(segment)
                    else:
                        partial.copy(segment, contents.pieces_in[number], at, name)
                self._sync(frozen)
                self._allocator.freeze(frozen)
                partial.finish(contents.manifest(self._run, len(paths), segments))
            except BaseException:
                partial.remove()
                raise
        del contents
        # Each snapshot leaves frozen segments. With frequent snapshots, the background thread alone cannot keep up.
        compaction.compact(self, *compaction.HURRY_FROM)
        self._compact_soon()

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
        if self._ownerships is None:
            raise ValueError(
                "commit: the files of a temporary store have no names (remedy: temporary=False, or snapshot())"
            )
        if sync:
            self._rescue()
        with self._committing:
            self._publish(self._contents(record), sync=sync, keep_previous=keep_previous)
            if not keep_previous:
                self._drop_previous()
        self._compact_soon()

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
            self._drop_previous()

    def _drop_previous(self) -> None:
        if not self._has_previous:
            return
        paths = [directory.path for directory in self._directories]
        remove(paths[0], manifests.PREVIOUS_NAME, sync=self._committed_sync)
        is_of_another_run = not self._previous
        self._previous, self._has_previous = [], False
        if is_of_another_run and self._has_committed:
            remove_others(paths, self._run, [])
        self._allocator.reclaim()

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
            if self._ownerships is None or self._committed:
                what = "is temporary" if self._ownerships is None else "has committed"
                raise ValueError(
                    f"go_back: this store {what}, and only a commit of an earlier store can be undone"
                )
            rename(pathlib.Path(self._directories[0].path, manifests.PREVIOUS_NAME), manifests.NAME)
            self._has_previous = False

    def _publish(self, contents: StoreContents, *, sync: bool, keep_previous: bool = False) -> None:
        """Replace the manifest with one for these contents.

        With ``keep_previous``, keep the old manifest as that of the previous commit.
        """
        paths = [directory.path for directory in self._directories]
        if sync:
            for path in self._made_in:
                sync_directory(path)
            self._made_in.clear()
            self._sync(contents.segments)
        segments = [
            StoredSegment(self._directories.index(one.directory), one.name or "", one.nbytes)
            for one in contents.segments
        ]
        data = contents.manifest(self._run, len(paths), segments)
        if not self._has_committed:
            mark_parts(paths, self._run, sync=sync)
        if sync:
            for path in reversed(paths):
                sync_directory(path)
        temporary = write_temporary(paths[0], data, self._run, sync=sync)
        # Until everything below has succeeded, the manifest on the disk may be the old or the new one. The pieces of
        # both must be kept.
        before, self._committed = self._committed, [*self._committed, contents]
        if keep_previous:
            self._previous, self._has_previous = [*self._previous, *before], True
            last = pathlib.Path(paths[0], manifests.NAME)
            rename(last, manifests.PREVIOUS_NAME, missing_ok=True)
        replace(temporary, manifests.NAME)
        if sync:
            sync_directory(paths[0])
        self._committed = [contents]
        if keep_previous:
            self._previous = before
        self._committed_sync = sync
        self._allocator.reclaim()
        if not self._has_committed:
            self._has_committed = True
            # The commit has succeeded. The next store removes what remains.
            with contextlib.suppress(StorageError):
                remove_others(paths, self._run, read_previous(paths[0]))

    def _sync(self, segments: Sequence[Segment]) -> None:
        """Make segments durable. A segment with a failed sync becomes read-only, because later syncs may fail, too."""
        failure = make_durable(segments)
        self._allocator.retire([segment for segment in segments if segment.sync_failed])
        if failure is not None:
            raise failure

    def _rescue(self) -> None:
        """Copy the data of segments with a failed sync to other segments, if checksums can show that it is intact."""
        with self._lock:
            lost = [
                segment
                for directory in self._directories
                for segment in directory.segments.values()
                if segment.sync_failed
            ]
        if lost and self._checksums:
            compaction.move_out(self, lost)

    def _contents(self, record: bytes) -> StoreContents:
        """Wait for all writes in progress, and return the current contents."""
        if not isinstance(record, bytes):
            raise TypeError(f"record: {type(record).__name__} is not bytes")
        with self._lock:
            writes = [one for one in list(self._pending) if isinstance(one, Write)]
        for write in writes:
            write.wait(None)
        with self._lock:
            self._check_open()
            self._sweep()
            return StoreContents(
                record,
                {
                    name: KeptTensor(kept.info, kept.pieces, kept.chunks)
                    for name, version in self._names.copy().items()  # a finalizer may delete a name
                    if (kept := last_kept(version)) is not None and kept.pieces is not None
                },
            )

    def _wait_for_pieces(self, name: str) -> tuple[tuple[Piece, ...], TensorInfo]:
        """Wait for a tensor's write, and return its pieces and its description."""
        with self._lock:
            version: TensorVersion | None = self._version_of(name)
        while version is not None:
            if (write := version.write) is not None:
                write.wait(None)
            if (pieces := version.pieces) is not None:
                return pieces, version.info
            version = version.previous
        raise StorageError(
            None,
            f"tensor {name!r}: no data is stored under this name, because no write of it has succeeded",
        )

    def stats(self) -> dict[str, Any]:
        """Return counters of transfers, and the space of each directory.

        ``written_nbytes`` and ``read_nbytes`` count the bytes of requested transfers, ``moved_nbytes`` the bytes that
        compaction has copied, and ``in_flight`` the transfers in progress. ``workers`` has the counters of the worker
        threads, as in :meth:`tensorferry.File.stats`.
        """
        self._enter()
        with self._lock:
            self._sweep()
        self._compact_soon()
        with self._lock:
            schedulers = list(dict.fromkeys(one.scheduler for one in self._directories))
            return {
                "tensors": len(self._names),
                "in_flight": len(self._pending),
                "written_nbytes": self._written_nbytes,
                "read_nbytes": self._read_nbytes,
                "moved_nbytes": self._moved_nbytes,
                "directories": [
                    {
                        "path": directory.path,
                        "segments": len(directory.segments),
                        "reserved_nbytes": directory.held_nbytes,
                        "used_nbytes": directory.used_nbytes,
                        "free_nbytes": directory.free_nbytes,
                    }
                    for directory in self._directories
                ],
                "workers": summed_stats([scheduler.stats() for scheduler in schedulers]),
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
        """
        if self.is_parents:
            self._closed = True  # the files and the locks belong to the parent process
            return
        self._refuse_reentrant_call()
        self._ending.set()
        if (compactor := self._compactor) not in (None, threading.current_thread()):
            schedulers = [directory.scheduler for directory in self._directories]
            wait_while_progressing(lambda seconds: _join(compactor, seconds), *schedulers)
        with self._closing, self._committing:
            with self._lock:
                if self._has_ended:
                    return
                self._closed = self._allocator.closed = True
            try:
                timed_out = self._finish()
            except BaseException:  # after Ctrl-C, close() can be called again
                self._closed = self._allocator.closed = False
                raise
            failure = None if timed_out else self._close_files()
            with self._lock:
                self._names.clear()
                self._pending.clear()
            self._release_resources(patient=not timed_out)
            self._has_ended = True
            if timed_out and not self._own_schedulers:
                warn_of_abandoned_io(f"outstanding transfers of {self!r}")
            if failure is not None:
                raise failure

    def _finish(self) -> bool:
        """Wait for all transfers. Return True if the wait was given up for lack of progress."""
        schedulers = [directory.scheduler for directory in self._directories]
        while (first := next(iter(self._pending), None)) is not None:
            if not wait_while_progressing(first.wait, *schedulers):
                return True
            self._pending.pop(first, None)
        files = [each.file for one in self._directories for each in one.segments.values()]
        return not all(wait_while_progressing(file.retire, *schedulers) for file in files)

    def _close_files(self) -> StorageError | None:
        """Close all files, and remove those that belong to no commit. Return the first error."""
        failure = None
        self._allocator.close_dropped()
        committed = {
            segment
            for contents in (*self._committed, *self._previous)
            for segment in contents.segments
        }
        for directory in self._directories:
            for segment in list(directory.segments.values()):
                try:
                    segment.file.close()
                except StorageError as error:
                    failure = failure or error
                if self._writable and segment not in committed:
                    directory.unlink(segment.name)
        if self._ownerships is not None:  # an interrupt may have left files that are in no table
            kept = {segment.name for segment in committed}
            remove_own([one.path for one in self._directories], self._run, kept)
        return failure

    def __enter__(self) -> TensorStore:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        paths = [directory.path for directory in self._directories]
        return f"<{state}tensorferry.store.TensorStore {paths!r}>"

    # Versions. The caller must hold the lock.

    def _version_of(self, name: str) -> TensorVersion:
        version = self._current(name)
        if version is None:
            raise KeyError(name)
        return version

    def _current(self, name: str) -> TensorVersion | None:
        """Return the last version, which may still be being written, or None."""
        version = self._names.get(name)
        if version is not None and version.write is not None:
            version.write.done()  # if the write has failed, this restores the previous version
            version = self._names.get(name)
        return version

    def _revert_to_previous(self, name: str, version: TensorVersion) -> None:
        """Restore the newest older version that has not failed, after the write of a version failed."""
        if self._names.get(name) is not version:
            return
        before = version.previous
        while before is not None and before.write is None and before.pieces is None:
            before = before.previous
        if before is None:
            self._names.pop(name, None)
        else:
            self._names[name] = before

    def _sweep_sometimes(self) -> None:
        """Drop the oldest transfers that have ended, with their arrays. Check all transfers only if there are many.

        Between two complete checks, the number of transfers doubles. So the cost of these checks is constant for each
        transfer on average.
        """
        while (first := next(iter(self._pending), None)) is not None and first.done():
            self._pending.pop(first, None)
        if len(self._pending) >= self._sweep_at_count:
            self._sweep()
            self._sweep_at_count = 2 * len(self._pending) + 64

    def _sweep(self) -> None:
        """Drop all transfers that have ended."""
        for transfer in list(self._pending):
            if transfer.done():
                self._pending.pop(transfer, None)

    # Checks, and space

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
        locks = [self._lock, self._committing, self._compacting]
        locks += [directory.growing for directory in self._directories]
        return any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]

    def _with_space(self, allocate: Callable[[], _Result]) -> _Result:
        """Call a function that allocates. If the disk is full, compact the store and call it again."""
        try:
            return allocate()
        except StorageError as error:
            if error.errno not in NO_SPACE:
                raise
        compaction.compact(self, 0, MAX_SEGMENT_NBYTES)
        return allocate()

    def _compact_soon(self) -> None:
        """Free dropped pieces, and start the compaction thread if the store is sparse. The caller must hold no lock."""
        self._allocator.reclaim()
        if self._allocator.is_sparse() and self._compactor is None and self._writable:
            compaction.start(self)

    def _check_open(self, *, writing: bool = False) -> None:
        self._check_process()
        if self._closed:
            raise ValueError(f"the store {[one.path for one in self._directories]!r} is closed")
        if writing and not self._writable:
            raise ValueError("the store was opened for reading only (remedy: write to a new store)")


class _Mapping:
    """The pieces of a mapping. The mapping owns this object, so compaction can see which segments are mapped."""

    __slots__ = ("__weakref__", "pieces")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces


def _join(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


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
    if len(shares) != count:
        raise ValueError(
            f"weights: one for each of the {count} directories is needed (got {len(shares)})"
        )
    for at, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(f"weights[{at}]: {share} is not positive")
    return shares
