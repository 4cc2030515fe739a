"""The moment from which a checkpoint is the new one: one rename of `.metadata`, and all that must come before it.

At every instant the directory holds the old checkpoint whole or the new one whole. Data files of a save have names that
no other save used, and are on the drive, names included, before the new `.metadata` takes the place of the old one in
one step. Only then is removed what nothing refers to any more: files of the checkpoint before, and, where no other save
is alive (:mod:`tensorferry.checkpoint.storage.savers`), of saves that did not come to their end.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import pickle
import re
import secrets
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry.base.file_locks import unread
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage.metadata import (
    CHUNK_NBYTES,
    EXTRAS,
    EXTRAS_VERSION,
    TRAILER_NBYTES,
    metadata_path,
    trailer_of,
)
from tensorferry.checkpoint.storage.names import METADATA_NAME, OWN_NAME, RANK_METADATA
from tensorferry.checkpoint.storage.savers import LOCK_NAME
from tensorferry.transfer.publication import (
    removed_if_it_fails,
    rename,
    sync_directory,
    unlink,
    write_temporary,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.storage import WriteResult

    from tensorferry.checkpoint.storage.savers import Saver
    from tensorferry.transfer.new_file import FileSummary

METADATA_VERSION = "1.0.0"

# Data files of torch (__0_0.distcp) and ours (__0_1f40fc92da241694_0.distcp), by rank.
_DATA_FILE = re.compile(r"__(\d+)_(?:[0-9a-f]{16}_)?\d+\.distcp")
_ANY_NAME = re.compile(rb"__\d+_(?:[0-9a-f]{16}_)?\d+\.distcp")
# Metadata that is being written; that of all ranks, or of one.
_UNFINISHED_METADATA = re.compile(r"(?:__(\d+))?\.metadata\.[0-9a-f]{16}\.tmp")

# The latest protocol that every supported Python reads.
_PICKLE_PROTOCOL = 4
# What TensorProperties pickled to before torch 2.15, which reads it as well; older ones read nothing else.
_PORTABLE_PROPERTIES = 5


def is_of_a_save(name: str) -> bool:
    """Return whether files of this name are a save's, and no checkpoint by themselves."""
    return name == LOCK_NAME or any(
        each.fullmatch(name) for each in (_DATA_FILE, _UNFINISHED_METADATA)
    )


def complete_metadata(metadata: Metadata, results: Iterable[Sequence[WriteResult]]) -> None:
    """Enter what all ranks wrote, and check that it is everything that was planned.

    Raises
    ------
    CheckpointError
        Something that the metadata describes was not written.
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
            _complete_place(metadata, result.index, info)
    check_complete(metadata, storage_data)
    if "version" in {field.name for field in dataclasses.fields(metadata)}:  # since torch 2.9
        metadata.version = METADATA_VERSION
    metadata.storage_data = storage_data
    metadata.__dict__.pop(EXTRAS, None)  # of a save before, where a planner keeps its metadata
    if files:
        extras = {"version": EXTRAS_VERSION, "chunk_nbytes": CHUNK_NBYTES, "files": files}
        metadata.__dict__[EXTRAS] = extras


def check_complete(metadata: Metadata, written: Container[MetadataIndex]) -> None:
    """Check that everything that was planned has been written.

    Raises
    ------
    CheckpointError
        Something has not.
    """
    missing = [index for index in _planned(metadata) if index not in written]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the parts that were to be saved have not been written; the checkpoint before this "
            "one stays",
            names=tuple(sorted({index.fqn for index in missing})),
        )


def _complete_place(metadata: Metadata, index: MetadataIndex, info: Any) -> None:
    """Leave the place of a payload in, if it is of the type that the metadata gives to all parts of its tensor."""
    place = info.__dict__.get(EXTRAS)
    if place is None:
        return
    entry = metadata.state_dict_metadata.get(index.fqn)
    if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype == place[2]:
        info.__dict__[EXTRAS] = place[:2]
    else:
        del info.__dict__[EXTRAS]


def _planned(metadata: Metadata) -> Iterable[MetadataIndex]:
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
) -> None:
    """Make a checkpoint the new one, and remove what nothing refers to any more.

    Parameters
    ----------
    directory : Path
        The checkpoint's.
    metadata : Metadata
        As :func:`complete_metadata` leaves it.
    saver : Saver
        Of this save.
    rank : int, optional
        The rank whose checkpoint it is, if it is one of its own.
    overwrite : bool
        Whether there may be one that it takes the place of.
    sync : bool
        Whether it would survive a power cut once this has returned.

    Raises
    ------
    CheckpointError
        Files are missing, or there is a checkpoint that must stay.
    """
    path = metadata_path(directory, rank)
    with saver.turn(), saver.alone() as alone:
        _check_files(directory, metadata)
        # As when the save began; but others may have come to their end since.
        if rank is not None:
            refuse_beside_all(directory)
        if not overwrite and path.exists():
            raise CheckpointError(
                "there is a checkpoint by now, and overwrite=False", str(directory)
            )
        # Other saves have files that no metadata names yet.
        removable = None if alone else _names_in(_metadata_files(directory, rank))
        write_metadata(path, metadata, sync=sync, overwrite=overwrite)
        referenced = {info.relative_path for info in metadata.storage_data.values()}
        # A save has succeeded even if what it replaces cannot be removed now, or is being loaded; the next one tries
        # again.
        with contextlib.suppress(OSError), unread(directory, METADATA_NAME) as is_unread:
            if is_unread:
                remove_replaced(directory, referenced, removable, rank=rank, sync=sync)
            if alone:
                remove_unfinished(directory, rank=rank)


def refuse_beside_all(directory: Path) -> None:
    """Refuse a rank's own checkpoint where there is one of all ranks.

    Raises
    ------
    CheckpointError
        There is one.
    """
    if metadata_path(directory).exists():
        # Every load would go on reading that one, and there is no moment at which it could be removed.
        raise CheckpointError(
            "the directory holds a checkpoint of all ranks together, which one saved with use_collectives=False "
            "cannot take the place of; save to another directory",
            str(directory),
        )


def _check_files(directory: Path, metadata: Metadata) -> None:
    """Check that every file that metadata names is there, with its size."""
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
                "not share the directory, or somebody removed it)",
                str(path),
            ) from None
        if nbytes != files[name][0] if name in files else nbytes < end:
            raise CheckpointError(
                f"a file of this save has {nbytes} bytes instead of {files[name][0] if name in files else end}; the "
                "checkpoint before this one stays",
                str(path),
            )


def write_metadata(path: Path, metadata: Metadata, *, sync: bool, overwrite: bool = True) -> None:
    """Put metadata in the place of what is there, at one stroke: from now on the checkpoint is the new one."""
    pickled = _pickled(metadata)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    write_temporary(temporary, pickled, trailer_of(pickled), sync=sync)
    with removed_if_it_fails(temporary):
        if overwrite or not _named(temporary, path):
            rename(temporary, path)
    if sync:
        sync_directory(path.parent)
        # It may be somebody else's, and then was made long ago.
        with contextlib.suppress(PermissionError):
            sync_directory(path.parent.parent)


def _named(temporary: Path, path: Path) -> bool:
    """Give a file its name unless something has it: where there are no locks, others may have been faster."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise CheckpointError(
            "there is a checkpoint by now, and overwrite=False", str(path.parent)
        ) from None
    except OSError:  # a file system without links
        return False
    temporary.unlink()
    return True


def remove_replaced(
    directory: Path,
    referenced: Iterable[str],
    removable: Iterable[str] | None = None,
    *,
    rank: int | None = None,
    sync: bool,
) -> None:
    """Remove data files that no metadata refers to any more.

    Parameters
    ----------
    directory : Path
        The checkpoint's.
    referenced : iterable of str
        Names of the files that stay.
    removable : iterable of str, optional
        Names of the files that may be removed; None: all others, as no other save is alive.
    rank : int, optional
        The rank whose files alone are looked at, for a checkpoint of its own.
    sync : bool
        Whether to make sure that metadata is gone before files that it refers to.
    """
    if rank is None:
        # Metadata of single ranks is not looked at once there is one for all.
        stale = [path for path in directory.iterdir() if RANK_METADATA.fullmatch(path.name)]
        unlink(stale)
        if stale and sync:
            sync_directory(directory)
    keep = set(referenced)
    may_go = None if removable is None else set(removable)
    unlink(
        path
        for path in _data_files(directory, rank)
        if path.name not in keep and (may_go is None or path.name in may_go)
    )


def remove_leftovers(directory: Path, *, rank: int | None = None) -> None:
    """Remove what is left of saves that did not come to their end, else they might fill the disk.

    No other save may be alive. Where there is metadata that is not ours, or not whole, no data file is removed; and
    nothing while somebody loads.
    """
    with unread(directory, METADATA_NAME) as is_unread:
        if is_unread:
            _remove_leftovers(directory, rank)


def _remove_leftovers(directory: Path, rank: int | None) -> None:
    remove_unfinished(directory, rank=rank)
    mentioned: set[str] = set()
    for path in directory.iterdir():
        if path.name == METADATA_NAME or RANK_METADATA.fullmatch(path.name):
            content = path.read_bytes()
            pickled, trailer = content[:-TRAILER_NBYTES], content[-TRAILER_NBYTES:]
            if trailer != trailer_of(pickled):
                return
            # Names stand in a pickle as they are; a mention too many only keeps a file for longer.
            mentioned.update(name.decode() for name in re.findall(OWN_NAME, pickled))
    unlink(
        path
        for path in _data_files(directory, rank)
        if re.fullmatch(OWN_NAME, path.name.encode()) and path.name not in mentioned
    )


def remove_unfinished(directory: Path, *, rank: int | None = None) -> None:
    """Remove metadata that was being written when its save was killed; no other save may be alive."""
    unlink(
        path
        for path in directory.iterdir()
        if (match := _UNFINISHED_METADATA.fullmatch(path.name))
        and rank in (None, int(match[1]) if match[1] else None)
    )


def _names_in(metadata: Iterable[Path]) -> set[str]:
    """Return the names of data files in metadata, as far as it can be read; they stand in a pickle as they are."""
    names: set[str] = set()
    for path in metadata:
        with contextlib.suppress(OSError):
            names.update(name.decode() for name in _ANY_NAME.findall(path.read_bytes()))
    return names


def _metadata_files(directory: Path, rank: int | None) -> list[Path]:
    """Return the metadata that a checkpoint takes the place of."""
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
    """Pickle metadata so that every supported torch can read it."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PICKLE_PROTOCOL)
    # Other than reducer_override(), it costs a call for these objects alone.
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _portable_properties}
    pickler.dump(metadata)
    return file.getvalue()


def _portable_properties(properties: TensorProperties) -> Any:
    state: Any = properties.__getstate__()  # type: ignore[no-untyped-call]
    if isinstance(state, tuple) and len(state) > _PORTABLE_PROPERTIES:
        state = state[:_PORTABLE_PROPERTIES]
    return copyreg.__newobj__, (type(properties),), state  # type: ignore[attr-defined]
