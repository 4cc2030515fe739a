"""FileSystemWriter: a fast and crash-safe replacement for torch's FileSystemWriter that writes the same files.

torch's terms: an item is one tensor, part of a tensor, or object to save. A planner makes each rank's plan, the list of
its items. The coordinator is the rank that makes the global plan and commits the checkpoint. A hook is an attribute of
torch's class that a subclass may override and that only torch's code uses
(:mod:`tensorferry.checkpoint.storage.hooks`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import os
import secrets
from collections import OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

import tensorferry
from tensorferry.base.checks import absolute_path
from tensorferry.base.reprs import safe_repr
from tensorferry.checkpoint.errors import cause_of
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import commit, rank_values, safe_objects
from tensorferry.checkpoint.storage.calls import FolderWriter
from tensorferry.checkpoint.storage.layout import content_nbytes, files_of, max_nbytes
from tensorferry.checkpoint.storage.metadata import CHUNK_NBYTES, EXTRAS, metadata_path
from tensorferry.checkpoint.storage.names import DATA_FILE_SUFFIX
from tensorferry.checkpoint.storage.savers import Saver
from tensorferry.checkpoint.storage.torch_classes import InPlaceOfTorchs
from tensorferry.checkpoint.zipformat.archive import (
    UnknownArchiveError,
    plain_bytes,
    tensor_archive,
)
from tensorferry.transfer import publication
from tensorferry.transfer.arrays import check_storage, is_dense
from tensorferry.transfer.new_file import NewFile, RawNewFile
from tensorferry.transfer.runtime import descriptor_limit

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.zipformat.archive import Archive

# An unfinished file has all of its items, but the core still writes its last bytes while the next files are written
# (single_file_per_rank=False). These are the limits for the number of such files, and for their bytes.
_MAX_UNFINISHED_FILES = 64
_MAX_UNFINISHED_NBYTES = 16 << 20
# Follow the installed torch, which has announced that the default will become False.
_OVERWRITE: bool = (
    inspect.signature(filesystem.FileSystemWriter.__init__).parameters["overwrite"].default
)
# The index of the result that has the descriptions of a rank's values; no name of a state is like it.
_DESCRIPTION = MetadataIndex("\0tensorferry")

_T = TypeVar("_T")


class FileSystemWriter(FolderWriter, InPlaceOfTorchs, filesystem.FileSystemWriter):
    """Saves checkpoints for torch.distributed.checkpoint, as torch's FileSystemWriter does.

    Data files have the same contents as torch's but names that are unique to each save. If a save is interrupted at any
    point, on any rank, the directory keeps its previous checkpoint; a completed save replaces it. Of several saves to
    one directory at the same time, the checkpoint of the last save to complete stays, intact. A failure on any rank
    fails the save, with the original error. ``.metadata`` also holds checksums of the data, which tensorferry's
    FileSystemReader and ``tensorferry verify`` use and torch ignores.

    Parameters
    ----------
    path : str or PathLike
        The checkpoint's directory; it is created if it is missing.
    single_file_per_rank : bool
        Whether to write one file for each rank (and thread), or one for each item.
    sync_files : bool
        Whether a completed save must survive a power cut.
    thread_count : int
        The number of files over which a rank's items are spread. The speed does not depend on it.
    per_thread_copy_ahead : int
        If this is positive, with an accelerator and one file, items are written in the order of their size, as torch
        does.
    cache_staged_state_dict : bool
        It has no effect: asynchronous saves always reuse the staging memory; see :class:`Stager`.
    overwrite : bool
        Whether an existing checkpoint may be replaced; the default is that of the installed torch's writer.
    progress : function of a Progress, optional
        Called by the saving thread, at most every 0.1 seconds and once at the end of this rank's part, with the
        progress of that part. An exception that it raises ends the save. Not called for saves in another process.
    **options
        Further arguments of torch's FileSystemWriter. ``_extensions`` and another ``serialization_format`` than
        torch.save's are refused, because only torch's writer supports them.

    Attributes
    ----------
    last_save : Throughput or None
        The bytes of this rank's part of the last save, and the time it took to write them; None if it failed.

    Notes
    -----
    In addition to the state, a save uses 60 MiB of memory for each rank, which the next save reuses. Tensors that a
    planner creates on demand are released one by one, as they are written.
    """

    # Whether to warn of objects that readers refuse without trust. install(trust_pickle=True) sets it to False for all
    # writers, and Checkpoints for its own, as it warns itself.
    _warns_of_refusals = True
    # Whether to compare what ranks save under one name. Checkpoints does that itself, before a save begins.
    _compares_ranks = True
    # The metric of a checkpoint of Checkpoints.
    _metric: float | None = None

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
        form = getattr(options.get("serialization_format"), "name", "TORCH_SAVE")
        for name, refused in {
            "_extensions": options.get("_extensions"),
            "serialization_format": form != "TORCH_SAVE",
        }.items():
            if refused:
                raise ValueError(
                    f"{name}: only torch's own writer supports {options[name]!r} (remedy: "
                    f"{filesystem.__name__}.FileSystemWriter)"
                )
        super().__init__(
            Path(absolute_path(path)),
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

    @safe_repr
    def __repr__(self) -> str:
        last = self.last_save and f"{self.last_save.nbytes} bytes in {self.last_save.seconds:.3g} s"
        return f"<tensorferry.checkpoint.FileSystemWriter {str(self.path)!r}: last save {last}>"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory, and refuse to overwrite where that is not allowed."""
        folder = self._begin_call().folder
        publication.make_directory(folder)
        rank = self._single_rank()
        if rank is not None:
            commit.refuse_if_all_ranks_saved(folder)
            plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
        # torch's writer would warn of a checkpoint that is overwritten. Ours keeps it until the new one is complete.
        if not self.overwrite and metadata_path(folder, None if rank is None else 0).exists():
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lock the directory, and remove the files of unfinished saves; no rank has begun to write yet."""
        call, rank = self._current_call(), self._single_rank()
        call.is_coordinator = True
        saver = call.saver = Saver(call.folder, rank)
        call.held.callback(saver.leave)
        if not saver.reaches_all:  # locks do not reach all machines, as on FUSE
            publication.check_renames(
                call.folder, replaced=metadata_path(call.folder, rank).exists()
            )
        with contextlib.suppress(OSError), saver.exclusive() as alone:
            if alone:
                commit.remove_leftovers(call.folder, rank=rank)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's items to new files; if anything fails, all of them are removed.

        Raises
        ------
        StorageError
            The file system refused an operation; the error has the file's name.
        """
        call = self._current_call()
        # Choose names here and not with the plan, because a planner may reuse a plan for the next save.
        prefix = getattr(plan.storage_data, "prefix", None) or f"__{self._rank()}_"
        try:
            results = self._write(call.folder, plan, planner, f"{prefix}{secrets.token_hex(8)}_")
            results += self._description(planner)
            call.free_state()
        except BaseException:
            call.end()
            raise
        if not call.is_coordinator:
            call.end()  # torch calls finish() on the coordinator only
        return completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, and remove the files of the previous one.

        Raises
        ------
        CheckpointError
            A part was not written, or a file is missing; the previous checkpoint stays.
        """
        call, rank = self._current_call(), self._single_rank()
        try:
            # Work on a copy: a planner may reuse its metadata for the next save, which may already be running.
            own = copy.copy(metadata)
            results = _compare_ranks(own, results)
            commit.complete_metadata(own, results)
            own.storage_meta = self.storage_meta()
            commit.replace(
                call.folder,
                own,
                call.saver or Saver(call.folder, rank),
                rank=rank,
                overwrite=self.overwrite,
                sync=self.sync_files,
                metric=self._metric,
            )
            metadata.__dict__.update(own.__dict__)
        finally:
            call.end()

    def __getstate__(self) -> dict[str, Any]:
        # An asynchronous save in another process pickles the writer. The state has been staged here by then, so the
        # copy does not need the stager.
        return self.__dict__ | {"_stager": None, "_progress": None}

    def _single_rank(self) -> int | None:
        """Return this rank if it saves without the others (use_collectives=False), otherwise None."""
        return None if getattr(self, "use_collectives", True) else self._rank()

    def _rank(self) -> int:
        return getattr(self, "rank", None) or 0

    def _description(self, planner: SavePlanner) -> list[WriteResult]:
        """Return what this rank saves under each name, as a result that only :meth:`finish` uses.

        The rank writes only some of these values: the planner leaves each one to one of the ranks that have it.
        """
        state = getattr(planner, "state_dict", None)
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if is_alone or self._single_rank() is not None or not self._compares_ranks:
            return []
        described = rank_values.describe(state) if isinstance(state, dict) else {}
        return [WriteResult(_DESCRIPTION, 0, described)]

    def _write(
        self, directory: Path, plan: SavePlan, planner: SavePlanner, prefix: str
    ) -> list[WriteResult]:
        new_files: list[NewFile] = []
        results: list[WriteResult] = []
        unfinished: deque[tuple[WriteResult, NewFile]] = deque()
        refusals: dict[str, str] | None = {} if self._warns_of_refusals else None
        self.last_save = None
        # Each unfinished file holds up to two descriptors.
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
            # The summary has the file's size and chunk checksums. It travels to the coordinator with the result of the
            # file's first item; complete_metadata() moves it from there to the metadata.
            result.storage_data.__dict__["tensorferry_file"] = file.wait()
            meter.add(0, files=1)

        try:
            for number, items in enumerate(files):
                if not items:
                    continue
                name = f"{prefix}{number}{DATA_FILE_SUFFIX}"
                bound = sum(map(max_nbytes, items))
                # Limit the number and size of unfinished files: each keeps at least one buffer in use.
                while unfinished and (
                    len(unfinished) == max_unfinished
                    or sum(file.nbytes for _, file in unfinished) > _MAX_UNFINISHED_NBYTES
                ):
                    finish_oldest()
                sums = tensorferry.Checksums(CHUNK_NBYTES, segments=True)
                file = NewFile(os.fspath(directory / name), reserve_nbytes=bound, checksums=sums)
                new_files.append(file)
                written = []
                for item in items:
                    written.append(_write_item(file, name, item, planner, refusals))
                    meter.add(content_nbytes(item) or written[-1].size_in_bytes)
                file.begin_finish(self.sync_files)
                unfinished.append((written[0], file))
                results += written
            while unfinished:
                finish_oldest()
            if self.sync_files:
                publication.sync_directory(directory)
            safe_objects.warn_of_refusals(refusals or {}, "FileSystemReader")
            self.last_save = meter.finish()
        except BaseException:
            with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
                for file in new_files:
                    cleanup.callback(file.abort)
            raise
        return results


def _compare_ranks(metadata: Metadata, results: list[list[WriteResult]]) -> list[list[WriteResult]]:
    """Compare what ranks save under one name, and return the results of data."""
    described = [each.storage_data for own in results for each in own if each.index == _DESCRIPTION]
    whole = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and len(entry.chunks) == 1
    ]
    rank_values.compare(described, whole)
    return [[each for each in own if each.index != _DESCRIPTION] for own in results]


def completed_future(result: _T) -> TorchFuture[_T]:
    """Return a completed torch future."""
    future: TorchFuture[_T] = TorchFuture()
    future.set_result(result)
    return future


def _write_item(
    file: NewFile,
    name: str,
    item: WriteItem,
    planner: SavePlanner,
    refusals: dict[str, str] | None,
) -> WriteResult:
    """Write an item, and release memory that the planner made for it as soon as it has been copied."""
    offset = file.nbytes
    data = planner.resolve_data(item)
    extras = None
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(
                f"{item.index.fqn}: the planner returned {type(data)} instead of BytesIO"
            )
        file.write_copied(data.getbuffer())
        if refusals is not None and (why := safe_objects.refusal(data.getvalue())) is not None:
            refusals[item.index.fqn] = why
    else:
        if not isinstance(data, torch.Tensor):
            raise TypeError(
                f"{item.index.fqn}: the planner returned {type(data)} instead of a tensor"
            )
        if is_dense(data):
            check_storage(data, item.index.fqn)
        kept = is_state_memory(data, item, planner)
        extras = _write_tensor(file, data.detach(), item, kept=kept)
        if not kept:
            file.wait_until_copied()
    length = file.nbytes - offset
    info = _StorageInfo(name, offset, length)
    if extras is not None:
        info.__dict__[EXTRAS] = extras
    return WriteResult(item.index, length, info)


def is_state_memory(tensor: torch.Tensor, item: WriteItem, planner: SavePlanner) -> bool:
    """Return whether a tensor is memory of the planner's state, and not a buffer that the planner may reuse."""
    state: Any = getattr(planner, "state_dict", None)
    if type(state) not in (dict, OrderedDict):  # other mappings may create values on access
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


def _write_tensor(
    file: NewFile, tensor: torch.Tensor, item: WriteItem, *, kept: bool
) -> tuple[int, int, torch.dtype] | None:
    """Write a tensor with the same bytes as torch.save.

    Return the offset and size of its elements in the archive, in C order, and their dtype, if metadata can describe it.
    """
    found = _bytes_and_archive(tensor)
    if found is None:
        kept = False
        tensor = tensor.cpu()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # copy only the elements that are used, as torch does
        found = _bytes_and_archive(tensor)
    if found is None:
        try:
            torch.save(tensor, RawNewFile(file))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise cause_of(error) from None
        return None
    content, archive = found
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
    return len(archive.pieces[0]), content.nbytes, tensor.dtype


def _bytes_and_archive(tensor: torch.Tensor) -> tuple[torch.Tensor, Archive] | None:
    """Return a tensor's bytes and the archive around them as torch.save writes it; None if one of them is unknown."""
    content = plain_bytes(tensor)
    if content is None:
        return None
    try:
        return content, tensor_archive(tensor.dtype, tensor.size(), tensor.stride())
    except UnknownArchiveError:
        return None
