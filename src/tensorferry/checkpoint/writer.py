"""FileSystemWriter: torch's, with the same files, at the drive's speed and safe against crashes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import secrets
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from tensorferry.checkpoint import commit
from tensorferry.checkpoint.archive import (
    UnknownArchiveError,
    plain_memory,
    tensor_archive,
)
from tensorferry.checkpoint.errors import CheckpointError, cause_of
from tensorferry.checkpoint.layout import files_of, max_nbytes
from tensorferry.checkpoint.metadata import EXTRAS, metadata_path
from tensorferry.checkpoint.pipeline import BUFFER_NBYTES, Pipeline
from tensorferry.checkpoint.stream import Stream, StreamFile
from tensorferry.checkpoint.watched import WatchedFileSystem

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from tensorferry.checkpoint.archive import Archive
    from tensorferry.checkpoint.staging import Stager
    from tensorferry.checkpoint.stream import FileSummary

# Files that are being finished while the next ones are written (single_file_per_rank=False).
_MAX_UNFINISHED_FILES = 64


class FileSystemWriter(filesystem.FileSystemWriter):
    """Saves checkpoints for torch.distributed.checkpoint, as torch's FileSystemWriter does.

    Data files have the same bytes as torch's, and other names: each save has its own. Whatever happens in the middle
    of a save, on any rank, the directory keeps the checkpoint that it had; with the end of the save it has the new one.
    A failure of any rank fails the save, with what went wrong. ``.metadata`` also keeps checksums of the data, which
    tensorferry's FileSystemReader and ``tensorferry verify`` use and torch ignores.

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
        Whether a checkpoint that is there may be replaced.
    **options
        Further arguments of torch's FileSystemWriter: ``_extensions``, ``serialization_format``. With extensions, or
        another format than torch.save's, torch's own code writes the files; all else stays as said above.

    Notes
    -----
    Beside the state, a save takes 40 MiB of memory for each rank, which is kept for the next one. Tensors that a
    planner makes on demand are let go of one by one, as they are written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            **options,
        )
        self._stager: Stager | None = None
        self._of_thread = threading.local()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save to another directory next, if one is given."""
        super().reset(checkpoint_id)
        self._of_thread.directory = Path(self.path if checkpoint_id is None else checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, and refuse what may not be overwritten."""
        directory = self._directory()
        commit.make_directory(directory)
        if self._alone() is not None and metadata_path(directory).exists():
            # Every load would go on reading that one, and there is no moment at which it could be removed.
            raise CheckpointError(
                "the directory holds a checkpoint of all ranks together, which one saved with use_collectives=False "
                "cannot take the place of; save to another directory",
                str(directory),
            )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give back the space of saves that did not come to their end; no rank has begun to write."""
        with contextlib.suppress(OSError):
            commit.remove_leftovers(self._directory(), rank=self._alone())
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's items to new files; none of them stays if anything fails.

        Raises
        ------
        StorageError
            The file system's refusal, with the file's name.
        """
        # Names are made here, not with the plan: a planner may use a plan again for the next save.
        save_id = secrets.token_hex(8)
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{self._rank()}_"
        if self._is_torchs():
            results = self._write_by_torch(plan, planner, f"{prefix}{save_id}_")
        else:
            results = self._write(plan, planner, f"{prefix}{save_id}_")
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint the new one, and remove what belonged to the one before.

        Raises
        ------
        CheckpointError
            Not everything was written; the checkpoint before stays.
        """
        commit.complete_metadata(metadata, results)
        metadata.storage_meta = self.storage_meta()
        directory, rank = self._directory(), self._alone()
        commit.write_metadata(metadata_path(directory, rank), metadata, sync=self.sync_files)
        referenced = {info.relative_path for info in metadata.storage_data.values()}
        # A save has succeeded even if what it replaces cannot be removed now; the next one tries again.
        with contextlib.suppress(OSError):
            commit.remove_replaced(directory, referenced, rank=rank, sync=self.sync_files)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state for an asynchronous save; see :class:`Stager`."""
        if self._stager is None:
            from tensorferry.checkpoint.staging import Stager

            self._stager = Stager()
        self.per_thread_copy_ahead = 0  # as in torch: nothing is on an accelerator any more
        staged: Any = self._stager.stage(state_dict)
        return staged  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the memory of staged states."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def __getstate__(self) -> dict[str, Any]:
        # The process of an asynchronous save gets the writer, and the state that has been staged here.
        return self.__dict__ | {"_stager": None, "_of_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())

    def _directory(self) -> Path:
        """Return where the present thread's save goes: asynchronous saves that overlap have a thread each."""
        return getattr(self._of_thread, "directory", None) or Path(self.path)

    def _alone(self) -> int | None:
        """Return this rank if it saves without the others (use_collectives=False), else None."""
        return None if getattr(self, "use_collectives", True) else self._rank()

    def _rank(self) -> int:
        return getattr(self, "rank", None) or 0

    def _is_torchs(self) -> bool:
        """Return whether torch's own code must write the files."""
        transforms = getattr(self, "transforms", None)
        form = getattr(self, "serialization_format", None)
        return bool(getattr(transforms, "extensions", ())) or (
            form is not None and form.name != "TORCH_SAVE"
        )

    def _write(self, plan: SavePlan, planner: SavePlanner, prefix: str) -> list[WriteResult]:
        directory = self._directory()
        streams: list[Stream] = []
        results: list[WriteResult] = []
        unfinished: deque[tuple[WriteResult, Future[FileSummary]]] = deque()
        files = files_of(
            plan.items,
            single_file_per_rank=self.single_file_per_rank,
            thread_count=self.thread_count,
            copies_ahead=self.per_thread_copy_ahead > 0,
        )

        def finish_oldest() -> None:
            result, ending = unfinished.popleft()
            # It travels to the coordinator with the file's first item; commit.complete_metadata() takes it.
            result.storage_data.__dict__["tensorferry_file"] = ending.result()

        try:
            with Pipeline() as pipeline:
                for number, items in enumerate(files):
                    if not items:
                        continue
                    name = f"{prefix}{number}.distcp"
                    bound = sum(map(max_nbytes, items))
                    path = os.fspath(directory / name)
                    stream = Stream(path, pipeline, reserve_nbytes=bound)
                    streams.append(stream)
                    written = [_write_item(stream, name, item, planner) for item in items]
                    unfinished.append((written[0], stream.finish_later(self.sync_files)))
                    results += written
                    if len(unfinished) > _MAX_UNFINISHED_FILES:
                        finish_oldest()
                while unfinished:
                    finish_oldest()
            if self.sync_files:
                commit.sync_directory(directory)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return results

    def _write_by_torch(
        self, plan: SavePlan, planner: SavePlanner, prefix: str
    ) -> list[WriteResult]:
        """Have torch write the files, whose threads and streams would hide failures."""
        directory, watched = self._directory(), WatchedFileSystem(self.sync_files)
        own = copy.copy(self)
        own.path, own.fs = directory, watched
        plan = dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))
        try:
            results: list[WriteResult] = (
                super(FileSystemWriter, own).write_data(plan, planner).wait()
            )
            if len(results) != len(plan.items):
                count = len(plan.items) - len(results)
                raise CheckpointError(f"{count} of {len(plan.items)} items have not been written")
            if self.sync_files:
                commit.sync_directory(directory)
        except BaseException as error:
            for path in watched.written:
                path.unlink(missing_ok=True)
            if watched.failures and isinstance(error, Exception):
                raise cause_of(watched.failures[0]) from None
            raise
        return results


def _write_item(stream: Stream, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    """Write an item; what the planner made for it is let go of as soon as it has been copied."""
    offset = stream.nbytes
    data = planner.resolve_data(item)
    extras = None
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{item.index.fqn}: the planner gives {type(data)} for bytes")
        stream.write(data.getbuffer())
    else:
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"{item.index.fqn}: the planner gives {type(data)} for a tensor")
        extras = _write_tensor(stream, data.detach().cpu(), item)
    length = stream.nbytes - offset
    info = _StorageInfo(name, offset, length)
    if extras is not None:
        info.__dict__[EXTRAS] = tuple(extras)
    return WriteResult(item.index, length, info)


class _Payload(NamedTuple):
    """Where in an archive a tensor's elements stand, in C order."""

    offset: int
    nbytes: int


def _write_tensor(stream: Stream, tensor: torch.Tensor, item: WriteItem) -> _Payload | None:
    """Write what torch.save would."""
    memory = plain_memory(tensor)
    archive = _archive_of(tensor) if memory is not None else None
    if archive is None and tensor.layout is torch.strided and not _has_own_storage(tensor):
        tensor = tensor.clone()  # with no more storage than it needs, as torch does
        memory = plain_memory(tensor)
        archive = _archive_of(tensor) if memory is not None else None
    if memory is None or archive is None:
        try:
            torch.save(tensor, StreamFile(stream))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise cause_of(error) from None
        return None
    stream.write(archive.pieces[0])
    checksum = stream.write_memory(memory, checksummed=True)
    if memory[1] > BUFFER_NBYTES:
        stream.copy_begun()  # else a planner's temporary of any size would live on for its last bytes
    stream.write_deferred(len(archive.pieces[1]), lambda: archive.piece(1, [checksum.value()]))
    planned = item.tensor_data
    as_planned = (
        planned is not None
        and planned.properties.dtype == tensor.dtype
        and planned.chunk.sizes == tensor.size()
    )
    if not as_planned or not tensor.is_contiguous():
        return None
    return _Payload(len(archive.pieces[0]), memory[1])


def _archive_of(tensor: torch.Tensor) -> Archive | None:
    try:
        return tensor_archive(tensor.dtype, tensor.size(), tensor.stride())
    except UnknownArchiveError:
        return None


def _has_own_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
