"""The store: names, and what lies where."""

from __future__ import annotations

import math
import mmap
import os
import pathlib
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tensorferry import _core
from tensorferry.base.checks import direct_mode, integer, kept_path
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError
from tensorferry.store import compaction
from tensorferry.store import manifest as manifests
from tensorferry.store.contents import Kept, StoreContents, last_kept, open_stored
from tensorferry.store.folder import (
    bring_back,
    check,
    make_directory,
    mark_parts,
    previous_of,
    remove,
    remove_others,
    remove_own,
    replace,
    set_aside,
    sync_directory,
    write_temporary,
)
from tensorferry.store.manifest import StoredSegment
from tensorferry.store.ownership import Ownership
from tensorferry.store.room import Room
from tensorferry.store.segments import (
    GRANULARITY,
    NO_SPACE,
    StoreDirectory,
    make_durable,
    parts_of,
)
from tensorferry.store.snapshots import Partial
from tensorferry.store.tensors import TensorInfo, info_of, new_array
from tensorferry.store.transfers import Read, TensorVersion, Transfer, Write, told
from tensorferry.transfer.arrays import memory_or_segments
from tensorferry.transfer.files import chosen_scheduler, in_background
from tensorferry.transfer.futures import Future
from tensorferry.transfer.publication import check_renames
from tensorferry.transfer.runtime import (
    automatic_scheduler,
    close_scheduler,
    default_scheduler,
    patiently,
    warn_of_left_behind,
)
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.base.checks import Direct, Path
    from tensorferry.store.segments import Piece, Segment
    from tensorferry.transfer.files import Priority
    from tensorferry.transfer.runtime import AnyScheduler

_Result = TypeVar("_Result")

DEFAULT_SEGMENT_NBYTES = 64 << 20
MAX_SEGMENT_NBYTES = 1 << 40


class TensorStore(Owned):
    """Named tensors in files of one directory or several.

    Any number of threads may use it, and any number of transfers may be on their way. Stores are context managers.

    Parameters
    ----------
    directories : str, bytes or PathLike, or a list or tuple of these
        Where the files go; made if missing. Several should be on several drives: tensors are spread over them.
    weights : sequence of positive numbers, optional
        How much of the bytes each directory takes, in relation to the others: for drives that are not equally fast.
    segment_nbytes : int
        Size of the files, a multiple of 4096; also the most that a tensor has in one piece. After 32 files of a
        directory the next ones are twice as large: each costs a descriptor, or two.
    temporary : bool
        Files have no names, and are gone with the store, however the process ends. With False they have names in
        directories that no other store may write into meanwhile, and :meth:`commit` makes them last.
    checksums : bool
        Take CRC-32s of what is written, and compare them with what is read.
    direct : "auto", True or False
        As for :func:`tensorferry.read` and :func:`tensorferry.write`.
    engine, block_size, queue_depth
        As for :func:`tensorferry.open`. Several directories have workers of their own, each.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable; nothing was touched.
    StorageError
        A directory cannot be used.
    EngineUnavailableError
        The engine cannot be had here.

    Notes
    -----
    A write makes a new version in space of its own; what was stored before is there until it has ended well, and its
    space is free then. A write that fails changes nothing. A read sees the last write that was begun before it, and
    waits for its end. Where that write fails, it gets what was stored before.

    A signal handler or a finalizer that calls a store which its thread is in the middle of calling gets a
    ``RuntimeError``, unless it only deletes or asks for names.
    """

    _refusal = (
        "this store was made before fork(): it is the parent process's; make another one here"
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
        for path in paths:
            self._made_in += make_directory(path)
        try:
            if not temporary:
                self._own(paths)
            for at, (path, share) in enumerate(zip(paths, shares, strict=True)):
                scheduler = self._new_scheduler(len(paths), engine, block_size, queue_depth)
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
            self._let_go()
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
        """Open what a snapshot has, or what has been committed to directories, for reading.

        Parameters
        ----------
        path : str, bytes or PathLike, or a list or tuple of these
            The snapshot's, or the store's; as many, and in the same order, as it was made with.
        previous : bool
            Open the commit before the last one, which ``commit(keep_previous=True)`` has kept.
        direct, engine, block_size, queue_depth
            As for the store.

        Raises
        ------
        StorageError
            There is nothing, not all of it, or what cannot be trusted; or the store that has committed it is alive
            (EBUSY): it will write over it.
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
                *(paths, schedulers, mode, store._room), previous=previous
            )
        except BaseException:
            store._let_go()
            raise
        return store

    def _set_up(self, checksums: bool, segment_nbytes: int) -> None:
        self._lock = threading.RLock()
        self._closing = threading.RLock()
        self._compacting = threading.RLock()  # taken before _committing, and that before _lock
        self._committing = threading.RLock()
        self._belong_here()
        self._checksums = checksums
        self._segment_nbytes = segment_nbytes
        self._writable = True
        self._closed = False
        self._has_ended = False  # all of close() has been done
        self._record = b""
        self._run = manifests.new_run()
        self._names: dict[str, TensorVersion] = {}
        self._room = Room(self._lock, segment_nbytes, self._sweep)
        self._pending: dict[Transfer, None] = {}  # in the order in which they were begun
        self._look_at = 64
        self._written_nbytes = self._read_nbytes = self._moved_nbytes = 0
        self._directories = self._room.directories
        self._made_in: list[str] = []  # has names of new directories, perhaps not yet durable
        self._own_schedulers: list[AnyScheduler] = []
        self._ownerships: list[Ownership] | None = None  # None: no file has a name
        # What the manifest in the directory names, or may name: nothing is written over it.
        self._committed: list[StoreContents] = []
        self._previous: list[StoreContents] = []  # and what that of the commit before names
        self._has_previous = False  # there is one, perhaps another run's
        self._committed_sync = False
        self._has_committed = False  # else the manifest is another run's
        self._mapped: weakref.WeakSet[_Mapped] = weakref.WeakSet()
        self._compactor: threading.Thread | None = None
        self._ending = threading.Event()  # compaction is to stop

    def _own(self, paths: list[str]) -> None:
        """Have directories for this store alone, and remove what dead ones have left behind."""
        self._ownerships = []
        for path in paths:
            self._ownerships.append(Ownership(path, self._run))
        check_renames(pathlib.Path(paths[0]), replaced=True)  # which a commit does
        committed = check(paths)
        self._has_previous = len(committed) > 1
        remove_others(paths, self._run, committed)

    def _new_scheduler(
        self, count: int, engine: str | None, block_size: int | None, queue_depth: int | None
    ) -> AnyScheduler:
        own: AnyScheduler | None = chosen_scheduler(engine, block_size, queue_depth)
        if own is None:
            if count == 1:
                return default_scheduler()
            own = automatic_scheduler()
        self._own_schedulers.append(own)
        return own

    def _let_go(self) -> None:
        """Give back what a constructor that fails has got."""
        for scheduler in self._own_schedulers:
            close_scheduler(scheduler)
        for ownership in self._ownerships or ():
            ownership.leave()

    @property
    def record(self) -> bytes:
        """What was given to the :meth:`commit` or :meth:`snapshot` that this has been opened from."""
        return self._record

    # Tensors

    def write(self, name: str, array: Any, priority: Priority = "normal") -> Future[Any]:
        """Begin to store an array under a name, in place of what was stored under it.

        Parameters
        ----------
        name : str
            Any text.
        array : torch.Tensor, numpy.ndarray, buffer, GPU array, or iterable of these
            As for :func:`tensorferry.write`. Do not change it before the ticket is done.
        priority : "normal" or "background"
            As for :func:`tensorferry.write`.

        Returns
        -------
        Future
            The ticket; its result is the array. Where it fails, what was stored before is still there.

        Raises
        ------
        ValueError, TypeError
            An argument is not usable; nothing was touched.
        StorageError
            There is no space (ENOSPC), or a file cannot be made; what was stored before is still there.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: {name!r} is no text")
        background = in_background(priority)
        self._enter(writing=True)
        array, memory = memory_or_segments(array, writable=False)
        info = info_of(array, memory[1])
        ticket: Future[Any] = Future(array, memory)
        with self._lock:
            self._sweep_sometimes()
        try:
            pieces = self._with_space(lambda: self._room.take(info.nbytes))
        except StorageError as error:
            raise told([error], f"writing tensor {name!r}") from None
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
        """Begin to read what is stored under a name.

        Parameters
        ----------
        name : str
            The tensor's.
        out : array or list of arrays, optional
            What to fill, of exactly as many bytes; as for :func:`tensorferry.read`. By default a new array of what was
            written: a torch tensor in host memory, a NumPy array, or a bytearray for what was neither.
        priority : "normal" or "background"
            As for :func:`tensorferry.read`.

        Returns
        -------
        Future
            The ticket; its result is the array.

        Raises
        ------
        KeyError
            Nothing is stored under the name, and no write of it is on its way.
        ValueError, TypeError
            An argument is not usable; nothing was touched.
        """
        background = in_background(priority)
        self._enter()
        with self._lock:
            version = self._version_of(name)
        info = version.info
        made = out is None
        if made:
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
                *(self, name, memory, version, info if made else None),
                background=background,
                owner=ticket,
            )
            self._pending[transfer] = None
            self._read_nbytes += info.nbytes
            ticket._start(transfer)
        ticket._is_about(False, name, 0, info.nbytes)
        return ticket

    def delete(self, name: str) -> None:
        """Forget a tensor; KeyError where there is none. Reads that have been begun get it all the same."""
        self._check_open(writing=True)
        with self._lock:
            self._version_of(name)
            self._names.pop(name, None)
        if not self._is_in_the_middle():
            self._compact_soon()

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and bytes of a tensor, the last one written; KeyError where there is none."""
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
        """See to it now that there is space, so that a disk that is full is found now.

        Parameters
        ----------
        nbytes : int, or mapping of str to int
            Bytes of all tensors together, those that are stored already included; better: of each tensor by its name.
        in_flight_nbytes : int, optional
            Bytes that are written anew at the same time: old and new versions then need space. By default two segments
            for each directory, or as much as the largest tensor.

        Raises
        ------
        StorageError
            There is not enough (ENOSPC); nothing more is reserved than before.
        """
        self._enter(writing=True)
        sizes: dict[str, int] | None = None
        if isinstance(nbytes, Mapping):
            sizes = {name: integer(size, f"nbytes[{name!r}]", 0) for name, size in nbytes.items()}
            total, largest = (
                sum(map(self._room.rounded, sizes.values())),
                max(sizes.values(), default=0),
            )
        else:
            total = largest = integer(nbytes, "nbytes", 0)
            largest = min(largest, self._segment_nbytes)
        if in_flight_nbytes is None:
            slack = max(2 * self._segment_nbytes * len(self._directories), largest)
            in_flight_nbytes = min(slack, total)
        slack = integer(in_flight_nbytes, "in_flight_nbytes", 0)
        self._room.reclaim()
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
        self._with_space(lambda: self._room.reserve([*missing, slack]))

    # What lasts

    def map(self, ranges: Iterable[tuple[str, int, int]]) -> Any:
        """Return ranges of tensors, one behind the other, as memory that is read when it is touched.

        It stays as it is, whatever is written meanwhile, and after the store is closed; what is changed in it stays in
        memory. Writes of these tensors that have been begun are waited for. Checksums are not compared. Touching what
        the drive cannot read is a SIGBUS, as with every mapping.

        Parameters
        ----------
        ranges : iterable of (name, offset, nbytes)
            Offsets are multiples of the page (``mmap.PAGESIZE``), and so are all sizes but the last one.

        Returns
        -------
        buffer
            For ``torch.frombuffer`` and ``numpy.frombuffer``: bytes that may be written to. The space of its tensors
            is not used again before its last view is gone.

        Raises
        ------
        KeyError
            Nothing is stored under a name.
        ValueError, TypeError
            A range is not usable.
        StorageError
            It cannot be mapped.
        """
        self._enter()
        files: list[_core.File] = []
        offsets: list[int] = []
        sizes: list[int] = []
        kept: list[Piece] = []
        for name, offset, nbytes in ranges:
            if sizes and sizes[-1] % mmap.PAGESIZE != 0:
                raise ValueError(
                    f"ranges: one of {sizes[-1]} bytes, no multiple of the page, is not the last"
                )
            pieces, info = self._settled(name)
            offset = integer(offset, "offset", 0)
            nbytes = integer(nbytes, "nbytes", 0)
            if offset % mmap.PAGESIZE != 0 or nbytes == 0 or offset + nbytes > info.nbytes:
                raise ValueError(
                    f"ranges: {nbytes} bytes at {offset} of tensor {name!r}, which has {info.nbytes}, cannot be "
                    f"mapped: they begin at multiples of {mmap.PAGESIZE}"
                )
            for piece, begin, end in parts_of(pieces, offset, offset + nbytes):
                files.append(piece.segment.file)
                offsets.append(piece.offset + begin)
                sizes.append(end - begin)
                kept.append(piece)
        if not files:
            raise ValueError("ranges: there are none")
        with self._lock:  # not while they are closed
            self._check_open()
            mapped = _Mapped(kept)
            self._mapped.add(mapped)
            return _core.map_pieces(files, offsets, sizes, mapped).bytes(0, sum(sizes))

    def snapshot(self, path: Path | Sequence[Path], record: bytes = b"") -> None:
        """Keep what is stored now in a new directory, for :meth:`open`. Writes that have been begun are waited for.

        On the same file system that takes no copy: files are linked, or share their blocks, and the store goes on with
        others. Their space is reserved here. It is durable when this returns; if this fails, or the process is killed,
        nothing has the name.

        Parameters
        ----------
        path : str, bytes or PathLike, or a list or tuple of these
            It must not exist. With several directories: one, or one on the file system of each of them.
        record : bytes
            Kept with it: :attr:`record`.

        Raises
        ------
        StorageError
            It exists (EEXIST), there is no space, or something cannot be read or written.
        """
        self._enter(writing=True)
        paths = _checked_directories(path, "path")
        if len(paths) not in (1, len(self._directories)):
            raise ValueError(f"path: {len(paths)} of them for {len(self._directories)} directories")
        with self._committing:
            contents = self._contents(record)
            if not self._checksums:  # else a copy shows whether anything was lost
                self._sync([segment for segment in contents.segments if segment.sync_failed])
            partial = Partial(paths, self._run)
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
                self._room.freeze(frozen)
                partial.finish(contents.manifest(self._run, len(paths), segments))
            except BaseException:
                partial.remove()
                raise
        del contents
        # Each snapshot leaves segments to which nothing more is written: the thread may not keep up with that.
        compaction.compact(self, *compaction.HURRY_FROM)
        self._compact_soon()

    def commit(
        self, record: bytes = b"", sync: bool = False, *, keep_previous: bool = False
    ) -> None:
        """Make what is stored now what :meth:`open` finds, however this process ends, until the next commit.

        Only with ``temporary=False``. Writes that have been begun are waited for. What an earlier commit names is not
        written over before this one has taken its place, at one stroke: space for both is needed. One without ``sync``
        takes the place of one with it as well: then a power cut may leave neither.

        Parameters
        ----------
        record : bytes
            Kept with it: :attr:`record`.
        sync : bool
            Make it last through a power cut as well. What an earlier one could not make durable is written to other
            files first, one tensor at a time, where its checksums say that it is all there.
        keep_previous : bool
            Keep the commit before as well, for ``open(previous=True)``, until :meth:`drop_previous` or the next commit:
            several processes that commit one after the other can then all go back to what each of them has.

        Raises
        ------
        ValueError
            The store is temporary.
        StorageError
            It could not be done; then the earlier commit, or this one, is there. A store without checksums fails from
            then on, until what lies in that file has been written again.
        """
        self._enter(writing=True)
        if self._ownerships is None:
            raise ValueError(
                "commit: files of a temporary store have no names (remedy: temporary=False, or snapshot())"
            )
        if sync:
            self._rescue()
        with self._committing:
            self._publish(self._contents(record), sync=sync, keep_previous=keep_previous)
            if not keep_previous:
                self.drop_previous()
        self._compact_soon()

    def drop_previous(self) -> None:
        """Do without the commit before the last one, if it is kept: its space is free.

        Raises
        ------
        StorageError
            Its manifest cannot be removed.
        """
        with self._committing:
            if not self._has_previous:
                return
            paths = [directory.path for directory in self._directories]
            remove(paths[0], manifests.PREVIOUS_NAME, sync=self._committed_sync)
            is_anothers = not self._previous
            self._previous, self._has_previous = [], False
            if is_anothers and self._has_committed:
                remove_others(paths, self._run, [])
            self._room.reclaim()

    def go_back(self) -> None:
        """Make the commit before the last one again; for a store that has not committed anything itself.

        Raises
        ------
        StorageError
            It is not kept, or cannot get its name.
        """
        with self._committing:
            bring_back(self._directories[0].path)
            self._has_previous = False

    def _publish(self, contents: StoreContents, *, sync: bool, keep_previous: bool = False) -> None:
        """Make contents what the manifest names; the one before is moved aside if it is to be kept."""
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
        # This one or that before may be the one that is found, until all of this has succeeded.
        before, self._committed = self._committed, [*self._committed, contents]
        if keep_previous:
            self._previous, self._has_previous = [*self._previous, *before], True
            set_aside(paths[0])
        replace(temporary, manifests.NAME)
        if sync:
            sync_directory(paths[0])
        self._committed = [contents]
        if keep_previous:
            self._previous = before
        self._committed_sync = sync
        self._room.reclaim()
        if not self._has_committed:
            self._has_committed = True
            remove_others(paths, self._run, previous_of(paths[0]))

    def _sync(self, segments: Sequence[Segment]) -> None:
        """Make segments durable. To those where that fails nothing more is written: their files fail for ever."""
        failure = make_durable(segments)
        self._room.retire([segment for segment in segments if segment.sync_failed])
        if failure is not None:
            raise failure

    def _rescue(self) -> None:
        """Copy what a failed sync may have lost to other files; without checksums nothing tells whether it is there."""
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
        """Return what is stored, when all writes that have been begun have ended."""
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
                    name: Kept(kept.info, kept.pieces, kept.chunks)
                    for name, version in self._names.copy().items()  # a finalizer may delete one
                    if (kept := last_kept(version)) is not None and kept.pieces is not None
                },
            )

    def _settled(self, name: str) -> tuple[tuple[Piece, ...], TensorInfo]:
        """Return where a tensor lies, when its write has ended."""
        with self._lock:
            version: TensorVersion | None = self._version_of(name)
        while version is not None:
            if (write := version.write) is not None:
                write.wait(None)
            if (pieces := version.pieces) is not None:
                return pieces, version.info
            version = version.previous
        raise StorageError(None, f"tensor {name!r}: nothing is stored, the write has failed")

    def stats(self) -> dict[str, Any]:
        """Return what has been moved, what is on its way, and the space of each directory.

        ``written_nbytes`` and ``read_nbytes`` count what was asked for, ``moved_nbytes`` what was copied to give
        segments back; ``engine`` and others are the counters of the
        workers, as of :meth:`tensorferry.File.stats`.
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

    # The end

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    def close(self) -> None:
        """Wait for transfers on their way, and close. Their tickets keep results and failures.

        Where nothing moves for 60 seconds it gives up, with a ``RuntimeWarning``; arrays stay referenced all the same.
        """
        if self.is_parents:
            self._closed = True  # the files are the parent's
            return
        self._refuse_in_the_middle()
        self._ending.set()
        if (compactor := self._compactor) not in (None, threading.current_thread()):
            schedulers = [directory.scheduler for directory in self._directories]
            patiently(lambda seconds: _joined(compactor, seconds), *schedulers)
        with self._closing, self._committing:
            with self._lock:
                if self._has_ended:
                    return
                self._closed = self._room.closed = True
            try:
                left = self._finish()
            except BaseException:  # Ctrl-C: to be closed again
                self._closed = self._room.closed = False
                raise
            failure = None if left else self._close_files()
            with self._lock:
                self._names.clear()
                self._pending.clear()
            for scheduler in self._own_schedulers:
                close_scheduler(scheduler, patient=not left)
            for ownership in self._ownerships or ():
                ownership.leave()
            self._has_ended = True
            if left and not self._own_schedulers:
                warn_of_left_behind(f"outstanding transfers of {self!r}")
            if failure is not None:
                raise failure

    def _finish(self) -> bool:
        """Wait for transfers; return whether some were given up."""
        schedulers = [directory.scheduler for directory in self._directories]
        while (first := next(iter(self._pending), None)) is not None:
            if not patiently(first.wait, *schedulers):
                return True
            self._pending.pop(first, None)
        files = [each.file for one in self._directories for each in one.segments.values()]
        return not all(patiently(file.retire, *schedulers) for file in files)

    def _close_files(self) -> StorageError | None:
        """Close all files, and remove those of no commit; return the first failure."""
        failure = None
        self._room.close_dropped()
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
        if self._ownerships is not None:  # Ctrl-C may have left files that are no segment's
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

    # Versions. All that follows is called with the lock held.

    def _version_of(self, name: str) -> TensorVersion:
        version = self._current(name)
        if version is None:
            raise KeyError(name)
        return version

    def _current(self, name: str) -> TensorVersion | None:
        """Return the last version, on its way or kept."""
        version = self._names.get(name)
        if version is not None and version.write is not None:
            version.write.done()  # it may have failed
            version = self._names.get(name)
        return version

    def _failed(self, name: str, version: TensorVersion) -> None:
        """Go back to what was there before a write."""
        if self._names.get(name) is not version:
            return
        before = version.previous  # the newest version, from here back, that has not failed
        while before is not None and before.write is None and before.pieces is None:
            before = before.previous
        if before is None:
            self._names.pop(name, None)
        else:
            self._names[name] = before

    def _sweep_sometimes(self) -> None:
        """Let go of what has ended, and of its array; all of it is looked at when there is much."""
        while (first := next(iter(self._pending), None)) is not None and first.done():
            self._pending.pop(first, None)
        if len(self._pending) >= self._look_at:
            self._sweep()
            self._look_at = 2 * len(self._pending) + 64

    def _sweep(self) -> None:
        """See which transfers have ended, and let go of them."""
        for transfer in list(self._pending):
            if transfer.done():
                self._pending.pop(transfer, None)

    def _enter(self, *, writing: bool = False) -> None:
        """Begin a call that changes, or needs, more than a table of names."""
        self._check_open(writing=writing)
        self._refuse_in_the_middle()

    def _refuse_in_the_middle(self) -> None:
        """Raise where this thread is in a call already: the locks let it in, and what is half done would be damaged."""
        if self._is_in_the_middle():
            raise RuntimeError(
                "this thread is in the middle of another call of this store (likely cause: a signal handler or a "
                "finalizer calls it; remedy: note there what is to be done, and do it later)"
            )

    def _is_in_the_middle(self) -> bool:
        locks = [self._lock, self._committing, self._compacting]
        locks += [directory.growing for directory in self._directories]
        return any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]

    def _with_space(self, take: Callable[[], _Result]) -> _Result:
        """Take space; where there is none, give up segments that are nearly empty, and try again."""
        try:
            return take()
        except StorageError as error:
            if error.errno not in NO_SPACE:
                raise
        compaction.compact(self, 0, MAX_SEGMENT_NBYTES)
        return take()

    def _compact_soon(self) -> None:
        """Take back what is free, and have a thread see whether there are segments to be given up. No lock is held."""
        self._room.reclaim()
        if self._room.is_sparse() and self._compactor is None and self._writable:
            compaction.start(self)

    def _check_open(self, *, writing: bool = False) -> None:
        self._check_process()
        if self._closed:
            raise ValueError(f"the store {[one.path for one in self._directories]!r} is closed")
        if writing and not self._writable:
            raise ValueError("the store was opened for reading only: a new one takes writes")


class _Mapped:
    """The pieces of a mapping, as long as there is one."""

    __slots__ = ("__weakref__", "pieces")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces


def _joined(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def _checked_directories(
    directories: Path | Sequence[Path], argument: str = "directories"
) -> list[str]:
    given = directories if isinstance(directories, (list, tuple)) else [directories]
    paths = [kept_path(path, f"{argument}[{at}]") for at, path in enumerate(given)]
    if not paths:
        raise ValueError(f"{argument}: one at least is needed, and this is an empty list")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ValueError(f"{argument}: one comes twice among {paths!r}")
    return paths


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    shares = [float(weight) for weight in weights]
    if len(shares) != count:
        raise ValueError(f"weights: {len(shares)} of them for {count} directories")
    for at, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(f"weights[{at}]: {share} is not positive")
    return shares
