"""Committing a checkpoint: one rename of `.metadata`, and the steps that must come before and after it.

A blob is the bytes that torch.save writes for one tensor or object. The payload is the range of a blob that has the
elements of the tensor; metadata may say where it is.

At every instant the directory holds either the complete old checkpoint or the complete new one. The data files of a
save have names that no other save used. They are fsynced, with their directory entries, before the rename replaces the
old `.metadata` atomically. Files that are no longer referenced are removed only after that: those of the previous
checkpoint and, when no other save is alive (:mod:`tensorferry.checkpoint.storage.savers`), those of unfinished saves.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry.base.file_locks import writer_lock
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage.metadata import (
    CHUNK_NBYTES,
    EXTRAS,
    EXTRAS_VERSION,
    metadata_path,
    metric_line_of,
    trailer_of,
)
from tensorferry.checkpoint.storage.names import (
    METADATA_NAME,
    OWN_NAME,
    RANK_METADATA,
    TRAILER_NBYTES,
)
from tensorferry.checkpoint.storage.savers import LOCK_NAME
from tensorferry.transfer.publication import (
    TEMPORARY_NAME,
    Temporary,
    storage_errors,
    sync_directory,
    unlink,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.storage import WriteResult

    from tensorferry.checkpoint.storage.savers import Saver
    from tensorferry.transfer.new_file import FileSummary

METADATA_VERSION = "1.0.0"

# Names of data files of torch (__0_0.distcp) and of our writer (__0_1f40fc92da241694_0.distcp). _DATA_FILE matches a
# file's name, and its group is the rank. _ANY_NAME finds the names in a pickle.
_DATA_FILE = re.compile(r"__(\d+)_(?:[0-9a-f]{16}_)?\d+\.distcp")
_ANY_NAME = re.compile(rb"__\d+_(?:[0-9a-f]{16}_)?\d+\.distcp")

# The latest protocol that every supported Python reads.
_PICKLE_PROTOCOL = 4
# The fields of TensorProperties before torch 2.15. Later versions read this form too; older ones read only this form.
_PORTABLE_PROPERTIES = 5


def is_save_file(name: str) -> bool:
    """Return whether a file name belongs to a save, so that the file alone is not a checkpoint."""
    return bool(name == LOCK_NAME or _DATA_FILE.fullmatch(name) or TEMPORARY_NAME.fullmatch(name))


def complete_metadata(metadata: Metadata, results: Iterable[Sequence[WriteResult]]) -> None:
    """Enter the results of all ranks into the metadata, and check that every planned part was written.

    Raises
    ------
    CheckpointError
        A part that the metadata describes was not written.
    """
    storage_data: dict[MetadataIndex, Any] = {}
    files: dict[str, tuple[int, bytes]] = {}
    for written in results:
        for result in written:
            info = result.storage_data
            storage_data[result.index] = info
            summary: FileSummary | None = info.__dict__.pop("tensorferry_file", None)
            if summary is not None:
                files[info.relative_path] = (summary.nbytes, summary.chunk_crcs)
            _keep_valid_place(metadata, result.index, info)
    check_complete(metadata, storage_data)
    if "version" in {field.name for field in dataclasses.fields(metadata)}:  # torch 2.9 and later
        metadata.version = METADATA_VERSION
    metadata.storage_data = storage_data
    metadata.__dict__.pop(EXTRAS, None)  # from a previous save, if the planner reuses its metadata
    if files:
        extras = {"version": EXTRAS_VERSION, "chunk_nbytes": CHUNK_NBYTES, "files": files}
        metadata.__dict__[EXTRAS] = extras


def check_complete(metadata: Metadata, written: Container[MetadataIndex]) -> None:
    """Check that every planned part has been written.

    Raises
    ------
    CheckpointError
        A part has not been written.
    """
    missing = [index for index in _planned_indexes(metadata) if index not in written]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the planned parts have not been written; the checkpoint before this one stays",
            names=tuple(sorted({index.fqn for index in missing})),
        )


def _keep_valid_place(metadata: Metadata, index: MetadataIndex, info: Any) -> None:
    """Keep the payload's location in ``info`` only if the payload has the dtype of the tensor in the metadata.

    Otherwise readers would take its bytes for elements of another dtype; without a location they parse the blob.
    """
    place = info.__dict__.get(EXTRAS)
    if place is None:
        return
    entry = metadata.state_dict_metadata.get(index.fqn)
    if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype == place[2]:
        info.__dict__[EXTRAS] = place[:2]
    else:
        del info.__dict__[EXTRAS]


def _planned_indexes(metadata: Metadata) -> Iterable[MetadataIndex]:
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            for chunk in described.chunks:
                yield MetadataIndex(name, chunk.offsets)
        elif isinstance(described, BytesStorageMetadata):
            yield MetadataIndex(name)


def replace(
    directory: Path,
    metadata: Metadata,
    saver: Saver,
    *,
    rank: int | None = None,
    overwrite: bool = True,
    sync: bool,
    metric: float | None = None,
) -> None:
    """Commit a checkpoint, and remove the files that nothing refers to any more.

    Parameters
    ----------
    directory : Path
        The checkpoint's directory.
    metadata : Metadata
        The metadata, completed by :func:`complete_metadata`.
    saver : Saver
        The locks of this save.
    rank : int, optional
        The rank, for a checkpoint that one rank saves without the others.
    overwrite : bool
        Whether an existing checkpoint may be replaced.
    sync : bool
        Whether the checkpoint must survive a power cut once this has returned.
    metric : float, optional
        The metric of the checkpoint, which is committed with it.

    Raises
    ------
    CheckpointError
        Files are missing, or there is a checkpoint that may not be replaced.
    """
    path = metadata_path(directory, rank)
    with saver.commit_turn(), saver.exclusive() as alone:
        _check_files(directory, metadata)
        # Both conditions below were checked when the save began, but other saves may have committed since.
        if rank is not None:
            refuse_if_all_ranks_saved(directory)
        if not overwrite and path.exists():
            raise _meanwhile(directory)
        # Without exclusive access, remove only files that the old metadata names: other saves may be writing all other
        # files.
        removable = None if alone else _names_in(_metadata_files(directory, rank))
        write_metadata(path, metadata, sync=sync, overwrite=overwrite, metric=metric)
        referenced = {info.relative_path for info in metadata.storage_data.values()}
        # The save has succeeded even if the old files cannot be removed now, or are being loaded. The next save tries
        # again.
        with contextlib.suppress(OSError), writer_lock(directory, METADATA_NAME) as is_unread:
            if is_unread:
                _remove_replaced(directory, referenced, removable, rank, sync=sync)


def refuse_if_all_ranks_saved(directory: Path) -> None:
    """Raise if the directory holds a checkpoint of all ranks, which a single rank's checkpoint cannot replace.

    Raises
    ------
    CheckpointError
        The directory holds a checkpoint of all ranks.
    """
    if metadata_path(directory).exists():
        # Loads would continue to read the old checkpoint, and no single rank can safely decide when to remove it.
        raise CheckpointError(
            "the directory has a checkpoint that all ranks saved together; a save with use_collectives=False cannot "
            "replace it (remedy: save to another directory)",
            str(directory),
        )


def _check_files(directory: Path, metadata: Metadata) -> None:
    """Check that every file that the metadata names exists and has its size."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    files = metadata.__dict__.get(EXTRAS, {}).get("files", {})
    for name, end in ends.items():
        path = directory / name
        try:
            nbytes = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                "a file of this save is missing; the checkpoint before this one stays (likely causes: the ranks do "
                "not share the directory, or the file was removed)",
                str(path),
            ) from None
        if nbytes != files[name][0] if name in files else nbytes < end:
            raise CheckpointError(
                f"a file of this save has {nbytes} bytes instead of {files[name][0] if name in files else end}; the "
                "checkpoint before this one stays",
                str(path),
            )


def write_metadata(
    path: Path,
    metadata: Metadata,
    *,
    sync: bool,
    overwrite: bool = True,
    metric: float | None = None,
) -> None:
    """Write metadata with atomic replacement: temporary file, fsync, rename. This commits the checkpoint."""
    content = _pickled(metadata) + metric_line_of(metric)
    with storage_errors(path), Temporary(path.parent) as new:
        new.write(content, trailer_of(content), sync=sync)
        if overwrite or not _link_if_absent(new, path):
            new.rename(path.name)
    if sync:
        sync_directory(path.parent)
        # The parent directory may belong to another user; then it is not new, and its entries are already on the drive.
        with contextlib.suppress(PermissionError):
            sync_directory(path.parent.parent)


def _link_if_absent(new: Temporary, path: Path) -> bool:
    """Link a file to its final name, unless that exists: without locks, another save may have committed first.

    Return False if the file system does not support hard links.
    """
    try:
        os.link(new.name, path.name, src_dir_fd=new.directory, dst_dir_fd=new.directory)
    except FileExistsError:
        raise _meanwhile(path.parent) from None
    except OSError:  # the file system does not support hard links
        return False
    return True


def _meanwhile(directory: Path) -> CheckpointError:
    return CheckpointError(
        "another save has completed a checkpoint in this directory meanwhile, and overwrite=False forbids replacing it",
        str(directory),
    )


def _remove_replaced(
    directory: Path,
    referenced: Container[str],
    removable: Container[str] | None,
    rank: int | None,
    *,
    sync: bool,
) -> None:
    """Remove data files that no metadata refers to any more.

    Without ``removable``, all files that are not in ``referenced`` are removed, so no other save may be alive. For the
    checkpoint of one rank, only this rank's files are removed.
    """
    if rank is None:
        # Readers ignore the metadata of single ranks once there is one for all ranks.
        stale = [path for path in directory.iterdir() if RANK_METADATA.fullmatch(path.name)]
        unlink(stale)
        if stale and sync:
            sync_directory(directory)
    unlink(
        path
        for path in _data_files(directory, rank)
        if path.name not in referenced and (removable is None or path.name in removable)
    )


def remove_leftovers(directory: Path, *, rank: int | None = None) -> None:
    """Remove the files of unfinished saves, which would fill the disk in time.

    No other save may be alive. No data file is removed if there is metadata that another program wrote or that is
    damaged, and no file at all while the checkpoint is being loaded.
    """
    with writer_lock(directory, METADATA_NAME) as is_unread:
        if not is_unread:
            return
        mentioned: set[str] = set()
        for path in _metadata_files(directory, None):
            content = path.read_bytes()
            pickled, trailer = content[:-TRAILER_NBYTES], content[-TRAILER_NBYTES:]
            if trailer != trailer_of(pickled):
                return
            # File names appear verbatim in a pickle. A false match only keeps a file for longer.
            mentioned.update(name.decode() for name in re.findall(OWN_NAME, pickled))
        unlink(
            path
            for path in _data_files(directory, rank)
            if re.fullmatch(OWN_NAME, path.name.encode()) and path.name not in mentioned
        )


def _names_in(metadata: Iterable[Path]) -> set[str]:
    """Return the names of data files in metadata files that can be read; names appear verbatim in a pickle."""
    names: set[str] = set()
    for path in metadata:
        with contextlib.suppress(OSError):
            names.update(name.decode() for name in _ANY_NAME.findall(path.read_bytes()))
    return names


def _metadata_files(directory: Path, rank: int | None) -> list[Path]:
    """Return the existing metadata files that a new checkpoint, of all ranks or of one ``rank``, replaces."""
    if rank is not None:
        return [path for path in [metadata_path(directory, rank)] if path.exists()]
    return [
        path
        for path in directory.iterdir()
        if path.name == METADATA_NAME or RANK_METADATA.fullmatch(path.name)
    ]


def _data_files(directory: Path, rank: int | None) -> list[Path]:
    return [
        path
        for path in directory.iterdir()
        if (match := _DATA_FILE.fullmatch(path.name))
        and rank in (None, int(match[1]))
        and path.is_file()
    ]


def _pickled(metadata: Metadata) -> bytes:
    """Pickle metadata in a form that every supported torch can read."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PICKLE_PROTOCOL)
    # reducer_override() would be called for every object; a dispatch table is used for this class only.
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _portable_properties}
    pickler.dump(metadata)
    return file.getvalue()


def _portable_properties(properties: TensorProperties) -> Any:
    state: Any = properties.__getstate__()  # type: ignore[no-untyped-call]
    if isinstance(state, tuple) and len(state) > _PORTABLE_PROPERTIES:
        state = state[:_PORTABLE_PROPERTIES]
    return copyreg.__newobj__, (type(properties),), state  # type: ignore[attr-defined]
