"""FileSystemWriter: torch's, with the same files, at the drive's speed and safe against crashes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import os
import secrets
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

import tensorferry
from tensorferry.base.checks import checked_path, kept_path
from tensorferry.base.reprs import once_made
from tensorferry.checkpoint.errors import CheckpointError, cause_of
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import commit, hooks, plain_objects
from tensorferry.checkpoint.storage.layout import content_nbytes, files_of, max_nbytes
from tensorferry.checkpoint.storage.metadata import CHUNK_NBYTES, EXTRAS, metadata_path
from tensorferry.checkpoint.storage.names import DATA_FILE_SUFFIX
from tensorferry.checkpoint.storage.savers import Saver
from tensorferry.checkpoint.storage.watched import WatchedFileSystem
from tensorferry.checkpoint.zipformat.archive import (
    UnknownArchiveError,
    plain_bytes,
    tensor_archive,
)
from tensorferry.transfer import publication
from tensorferry.transfer.arrays import check_storage, is_plain
from tensorferry.transfer.new_file import NewFile, RawNewFile
from tensorferry.transfer.runtime import descriptor_limit

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.staging import Stager
    from tensorferry.checkpoint.zipformat.archive import Archive

# Files that are being finished while the next ones are written (single_file_per_rank=False), and their bytes.
_MAX_UNFINISHED_FILES = 64
_MAX_UNFINISHED_NBYTES = 16 << 20
# Torch has announced that it will be False.
_OVERWRITE: bool = (
    inspect.signature(filesystem.FileSystemWriter.__init__).parameters["overwrite"].default
)


_T = TypeVar("_T")


@dataclasses.dataclass
class _Save:
    """A save on its way: asynchronous saves that overlap have a thread each."""

    directory: Path
    saver: Saver | None = None  # of the coordinator


def _this_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


class _NothingThere(filesystem.FileSystem):
    """For torch's plan, which warns of a checkpoint that is there: ours keeps it until the new one is whole."""

    def exists(self, path: str | os.PathLike[str]) -> bool:  # noqa: ARG002
        """Return False."""
        return False


# The coordinator's that has written its own part: of each thread, the last one.
_finishing = threading.local()


class FileSystemWriter(filesystem.FileSystemWriter):
    """Saves checkpoints for torch.distributed.checkpoint, as torch's FileSystemWriter does.

    Data files have the same bytes as torch's, and other names: each save has its own. Whatever happens in the middle
    of a save, on any rank, the directory keeps the checkpoint that it had; with the end of the save it has the new one.
    Of saves that go there at the same time the last one to end stays, whole. A failure of any rank fails the save, with
    what went wrong. ``.metadata`` also keeps checksums of the data, which tensorferry's FileSystemReader and
    ``tensorferry verify`` use and torch ignores.

    Parameters
    ----------
    path : str or PathLike
        The checkpoint's directory; it is made if it is missing.
    single_file_per_rank : bool
        One file for each rank (and thread), else one for each item.
    sync_files : bool
        Whether a save that has ended would survive a power cut.
    thread_count : int
        Over how many files a rank's items are spread. Speed does not depend on it.
    per_thread_copy_ahead : int
        With an accelerator and one file, items are written in order of their size if this is positive, as torch does.
    cache_staged_state_dict : bool
        Without effect: asynchronous saves always stage into memory that is kept for the next one; see :class:`Stager`.
    overwrite : bool
        Whether a checkpoint that is there may be replaced; by default what it is for the installed torch's writer.
    progress : function of a Progress, optional
        Called by the thread that saves, at most every 0.1 seconds and once at the end of this rank's part, with how far
        that has come. What it raises ends the save. Not called for saves in another process.
    **options
        Further arguments of torch's FileSystemWriter: ``_extensions``, ``serialization_format``. With extensions, or
        another format than torch.save's, torch's own code writes the files; all else stays as said above.

    Attributes
    ----------
    last_save : Throughput or None
        How many bytes this rank's part of the last save had, and in what time it was written; None if it failed.

    Notes
    -----
    Beside the state, a save takes 60 MiB of memory for each rank, which is kept for the next one. Tensors that a
    planner makes on demand are let go of one by one, as they are written.
    """

    # Whether objects that readers refuse without trust are told; install() and Checkpoints say otherwise.
    _warns_of_refusals = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = _OVERWRITE,
        *,
        progress: Listener | None = None,
        **options: Any,
    ) -> None:
        checked_listener(progress)
        super().__init__(
            hooks.first_folder(self, FileSystemWriter, path),
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            **options,
        )
        self.last_save: Throughput | None = None
        self._progress = progress
        self._stager: Stager | None = None
        self._staged_in: tuple[tuple[int, int], str] | None = None
        self._of_thread = threading.local()

    @once_made
    def __repr__(self) -> str:
        last = self.last_save and f"{self.last_save.nbytes} bytes in {self.last_save.seconds:.3g} s"
        return f"<tensorferry.checkpoint.FileSystemWriter {str(self.path)!r}: last save {last}>"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save to another directory next, if one is given."""
        directory = None
        if checkpoint_id and hooks.has_own_files(self):
            super().reset(checkpoint_id)
            return
        if checkpoint_id:
            # async_save() stages in the caller's thread, and names the folder in that of the save, or another process.
            asked = checked_path(checkpoint_id, "checkpoint_id")
            thread, here = self._staged_in or (None, None)
            is_anothers = here is not None and thread != _this_thread()
            directory = Path(here, asked) if is_anothers else Path(kept_path(asked))  # type: ignore[arg-type]
        super().reset(directory)
        # Asynchronous saves that overlap have a thread each, and this object together.
        self._of_thread.next_directory = directory

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, and refuse what may not be overwritten."""
        hooks.check_folder(self)
        directory = self._directory()
        if (forgotten := getattr(_finishing, "saver", None)) is not None:
            forgotten.leave()  # of a save that failed on another rank: nobody told its writer
            _finishing.saver = None
        self._of_thread.save = _Save(directory)
        self._of_thread.next_directory = None
        if changed := self._changed_for_all():
            hooks.tell(
                self,
                changed,
                "it saves, without checksums, and what a save that fails leaves is not looked at",
            )
            self._of_thread.save = None
            return super().prepare_local_plan(plan)
        publication.make_directory(directory)
        if self._alone() is not None:
            commit.refuse_beside_all(directory)
        own = copy.copy(self)
        own.path = directory
        if self.overwrite:
            own.fs = _NothingThere()
        return super(FileSystemWriter, own).prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give back the space of saves that did not come to their end; no rank has begun to write."""
        if self._changed_for_all():
            return super().prepare_global_plan(plans)
        save = self._of_thread.save = self._save()
        save.saver = Saver(save.directory, self._alone())
        if not save.saver.reaches_all:  # FUSE, for one
            is_there = metadata_path(save.directory, self._alone()).exists()
            publication.check_renames(save.directory, replaced=is_there)
        with contextlib.suppress(OSError), save.saver.alone() as alone:
            if alone:
                commit.remove_leftovers(save.directory, rank=self._alone())
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's items to new files; none of them stays if anything fails.

        Raises
        ------
        StorageError
            The file system's refusal, with the file's name.
        """
        if self._changed_for_all():
            written = super().write_data(plan, planner).wait()
            return done(all_of(written, plan))
        note_staged(planner)
        # Names are made here, not with the plan: a planner may use a plan again for the next save.
        save_id = secrets.token_hex(8)
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{self._rank()}_"
        try:
            if self._is_torchs():
                results = self._write_by_torch(plan, planner, f"{prefix}{save_id}_")
            else:
                results = self._write(plan, planner, f"{prefix}{save_id}_")
        except BaseException:
            self._end_save()
            raise
        _finishing.saver = self._save().saver
        if _finishing.saver is None:
            self._end_save()  # the coordinator goes on
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint the new one, and remove what belonged to the one before.

        Raises
        ------
        CheckpointError
            Not everything was written, or is there; the checkpoint before stays.
        """
        if self._changed_for_all():
            commit.check_complete(metadata, {result.index for each in results for result in each})
            super().finish(metadata, results)
            return
        _finishing.saver = None
        try:
            save, rank = self._save(), self._alone()
            # A planner may keep what it gives, for the next save, which may be on its way.
            own = copy.copy(metadata)
            commit.complete_metadata(own, results)
            own.storage_meta = self.storage_meta()
            commit.replace(
                save.directory,
                own,
                save.saver or Saver(save.directory, rank),
                rank=rank,
                overwrite=self.overwrite,
                sync=self.sync_files,
            )
            metadata.__dict__.update(own.__dict__)
        finally:
            self._end_save()

    def storage_meta(self) -> StorageMeta | None:
        """Return what `.metadata` says of the save."""
        meta = super().storage_meta()
        if meta is not None and meta.checkpoint_id is not None:
            # The class of a path is whoever's, and where that is missing nobody could read the metadata.
            meta.checkpoint_id = os.fspath(meta.checkpoint_id)
        return meta

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the present thread's save."""
        return self.path if self._changed_for_all() else self._directory()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state for an asynchronous save; see :class:`Stager`."""
        if self._stager is None:
            from tensorferry.checkpoint.staging import Stager

            self._stager = Stager()
        self.per_thread_copy_ahead = 0  # as in torch: nothing is on an accelerator any more
        # Where it has been removed no path is relative.
        with contextlib.suppress(FileNotFoundError):
            self._staged_in = _this_thread(), str(Path.cwd())
        staged: Any = self._stager.stage(state_dict)
        return staged  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the memory of staged states."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def __getstate__(self) -> dict[str, Any]:
        # The process of an asynchronous save gets the writer, and the state that has been staged here.
        return self.__dict__ | {"_stager": None, "_of_thread": None, "_progress": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())

    def _directory(self) -> Path:
        """Return where the present thread's save goes."""
        return self._save().directory

    def _save(self) -> _Save:
        """Return the present thread's save; it goes to the directory of its last reset(), else to anyone's."""
        save: _Save | None = getattr(self._of_thread, "save", None)
        if save is None:
            save = _Save(getattr(self._of_thread, "next_directory", None) or Path(self.path))
        return save

    def _end_save(self) -> None:
        saver = self._save().saver
        self._of_thread.save = self._of_thread.next_directory = None
        if saver is not None:
            saver.leave()

    def _changed_for_all(self) -> frozenset[str]:
        """Return what a subclass has changed, where that is not about the files of a save alone."""
        changed = hooks.changed(self, _HOOKS)
        return changed if changed - _OF_FILES else frozenset()

    def _alone(self) -> int | None:
        """Return this rank if it saves without the others (use_collectives=False), else None."""
        return None if getattr(self, "use_collectives", True) else self._rank()

    def _rank(self) -> int:
        return getattr(self, "rank", None) or 0

    def _is_torchs(self) -> bool:
        """Return whether torch's own code must write the files."""
        form = getattr(self, "serialization_format", None)
        return (
            bool(getattr(getattr(self, "transforms", None), "extensions", ()))
            or (form is not None and form.name != "TORCH_SAVE")
            or bool(hooks.changed(self, _HOOKS))
        )

    def _write(self, plan: SavePlan, planner: SavePlanner, prefix: str) -> list[WriteResult]:
        directory = self._directory()
        made: list[NewFile] = []
        results: list[WriteResult] = []
        unfinished: deque[tuple[WriteResult, NewFile]] = deque()
        refusals: dict[str, str] | None = {} if self._warns_of_refusals else None
        self.last_save = None
        # Each holds two descriptors at most.
        max_unfinished = max(1, min(_MAX_UNFINISHED_FILES, descriptor_limit() // 4))
        files = files_of(
            plan.items,
            single_file_per_rank=self.single_file_per_rank,
            thread_count=self.thread_count,
            copies_ahead=self.per_thread_copy_ahead > 0,
        )

        meter = Meter(
            self._progress,
            total_nbytes=sum(map(content_nbytes, plan.items)),
            total_files=sum(map(bool, files)),
        )

        def finish_oldest() -> None:
            result, file = unfinished.popleft()
            # It travels to the coordinator with the file's first item; commit.complete_metadata() takes it.
            result.storage_data.__dict__["tensorferry_file"] = file.wait()
            meter.add(0, files=1)

        try:
            for number, items in enumerate(files):
                if not items:
                    continue
                name = f"{prefix}{number}{DATA_FILE_SUFFIX}"
                bound = sum(map(max_nbytes, items))
                # A file that is being finished has a buffer at least.
                while unfinished and (
                    len(unfinished) == max_unfinished
                    or sum(file.nbytes for _, file in unfinished) > _MAX_UNFINISHED_NBYTES
                ):
                    finish_oldest()
                sums = tensorferry.Checksums(CHUNK_NBYTES, segments=True)
                path = os.fspath(directory / name)
                file = NewFile(path, reserve_nbytes=bound, checksums=sums)
                made.append(file)
                written = []
                for item in items:
                    written.append(_write_item(file, name, item, planner, refusals))
                    meter.add(content_nbytes(item) or written[-1].size_in_bytes)
                file.begin_to_finish(self.sync_files)
                unfinished.append((written[0], file))
                results += written
            while unfinished:
                finish_oldest()
            if self.sync_files:
                publication.sync_directory(directory)
            self.last_save = meter.finish()
            plain_objects.warn_of(refusals or {}, "FileSystemReader")
        except BaseException:
            with contextlib.suppress(OSError), contextlib.ExitStack() as whatever_happens:
                for file in made:
                    whatever_happens.callback(file.abort)
            raise
        return results

    def _write_by_torch(
        self, plan: SavePlan, planner: SavePlanner, prefix: str
    ) -> list[WriteResult]:
        """Have torch write the files, whose threads and streams would hide failures."""
        directory, watched = self._directory(), WatchedFileSystem(self.sync_files)
        here = os.getpid()
        own = copy.copy(self)
        own.path, own.fs = directory, watched
        plan = dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))
        try:
            results: list[WriteResult] = (
                super(FileSystemWriter, own).write_data(plan, planner).wait()
            )
            all_of(results, plan)
            if self.sync_files:
                publication.sync_directory(directory)
        except BaseException as error:
            if here == os.getpid():  # else they are the parent's
                watched.give_up()
                for path in watched.written:
                    with contextlib.suppress(OSError):  # what failed before is what matters
                        path.unlink()
            if watched.failures and isinstance(error, Exception):
                raise cause_of(watched.failures[0]) from None
            raise
        return results


# Ours calls torch's prepare_local_plan(), which asks whether there is a checkpoint.
_HOOKS = hooks.hooks_of(
    FileSystemWriter, filesystem.FileSystemWriter, frozenset({"_metadata_exists"})
)
# What is about the files of a save alone, which are new ones, and count only when all is there.
_OF_FILES = frozenset({"_write_data", "transforms"})


def done(result: _T) -> TorchFuture[_T]:
    """Return a future of torch's that has its result."""
    future: TorchFuture[_T] = TorchFuture()
    future.set_result(result)
    return future


def note_staged(planner: SavePlanner) -> None:
    """Tell stagers, where there are any, that this thread saves what may be theirs."""
    staging = sys.modules.get("tensorferry.checkpoint.staging")
    state: Any = getattr(planner, "state_dict", None)
    if staging is not None and isinstance(state, Mapping):
        staging.saved_here(state.values())


def all_of(results: list[WriteResult], plan: SavePlan) -> list[WriteResult]:
    """Return what torch's code says it has written, if that is all: its threads tell nobody what they fail with."""
    if len(results) < len(plan.items):
        count = len(plan.items) - len(results)
        raise CheckpointError(f"{count} of {len(plan.items)} items have not been written")
    return results


def _write_item(
    file: NewFile,
    name: str,
    item: WriteItem,
    planner: SavePlanner,
    refusals: dict[str, str] | None,
) -> WriteResult:
    """Write an item; what the planner made for it is let go of as soon as it has been copied."""
    offset = file.nbytes
    data = planner.resolve_data(item)
    extras = None
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{item.index.fqn}: the planner gives {type(data)} for bytes")
        file.write_copied(data.getbuffer())
        if refusals is not None and (why := plain_objects.refusal(data.getvalue())) is not None:
            refusals[item.index.fqn] = why
    else:
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"{item.index.fqn}: the planner gives {type(data)} for a tensor")
        if is_plain(data):
            check_storage(data, item.index.fqn)
        kept = is_of_state(data, item, planner)
        extras = _write_tensor(file, data.detach(), item, kept=kept)
        if not kept:
            file.wait_until_copied()
    length = file.nbytes - offset
    info = _StorageInfo(name, offset, length)
    if extras is not None:
        info.__dict__[EXTRAS] = tuple(extras)
    return WriteResult(item.index, length, info)


def is_of_state(tensor: torch.Tensor, item: WriteItem, planner: SavePlanner) -> bool:
    """Return whether a planner gave memory of its state's, not some that it may fill again for the next item."""
    state: Any = getattr(planner, "state_dict", None)
    if type(state) not in (dict, OrderedDict):  # others may make what they are asked for
        return False
    entry = state.get(item.index.fqn)
    if isinstance(entry, ShardedTensor):
        parts = [shard.tensor for shard in entry.local_shards()]
    else:
        parts = [getattr(entry, "_local_tensor", entry)]
    return any(
        type(part) in (torch.Tensor, torch.nn.Parameter)
        and part.layout is torch.strided
        and tensor.layout is torch.strided
        and part.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        for part in parts
    )


class _Payload(NamedTuple):
    """Where in an archive a tensor's elements stand, in C order, and what they are."""

    offset: int
    nbytes: int
    dtype: torch.dtype


def _write_tensor(
    file: NewFile, tensor: torch.Tensor, item: WriteItem, *, kept: bool
) -> _Payload | None:
    """Write what torch.save would."""
    content, archive = _bytes_and_archive(tensor)
    if archive is None:
        kept = False
        tensor = tensor.cpu()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # with no more storage than it needs, as torch does
        content, archive = _bytes_and_archive(tensor)
    if content is None or archive is None:
        try:
            torch.save(tensor, RawNewFile(file))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise cause_of(error) from None
        return None
    file.write_bytes(archive.pieces[0])
    payload = file.segment_count
    file.write(content, kept=kept)
    file.write_bytes(archive.pieces[1], archive.fields(1, [payload]))
    planned = item.tensor_data
    as_planned = (
        planned is not None
        and planned.properties.dtype == tensor.dtype
        and planned.chunk.sizes == tensor.size()
    )
    if not as_planned or not tensor.is_contiguous():
        return None
    return _Payload(len(archive.pieces[0]), content.nbytes, tensor.dtype)


def _bytes_and_archive(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor | None, Archive | None]:
    """Return a tensor's bytes, and what torch.save puts around them; None where that is not known."""
    content = plain_bytes(tensor)
    if content is None:
        return None, None
    try:
        return content, tensor_archive(tensor.dtype, tensor.size(), tensor.stride())
    except UnknownArchiveError:
        return content, None
