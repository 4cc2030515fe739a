"""What is in a checkpoint, by its metadata alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorferry.checkpoint.metadata import RANK_METADATA, metadata_path, read_metadata

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True)
class Shard:
    """A stored part of a tensor, or all of it; or an object.

    Attributes
    ----------
    offsets, sizes : tuple of int
        Which part; both empty for objects.
    file : str or None
        The data file's name; None where the checkpoint does not say where it lies.
    begin, end : int
        Where in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Entry:
    """An entry of a checkpoint.

    Attributes
    ----------
    name : str
        What it is called in the state dict.
    dtype : str or None
        Such as "float32"; None for an object that is no tensor.
    shape : tuple of int
        Of the whole tensor.
    nbytes : int
        Of the whole tensor's elements, or of the pickled object.
    shards : tuple of Shard
        Its parts.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    shards: tuple[Shard, ...]


def metadata_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the metadata of a checkpoint: one file, or one for each rank that saved without collectives.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    whole = metadata_path(path)
    if whole.exists():
        return [whole]
    folder = Path(path)
    ranks = {}
    if folder.is_dir():
        for file in folder.iterdir():
            if match := RANK_METADATA.fullmatch(file.name):
                ranks[int(match[1])] = file
    if not ranks:
        raise FileNotFoundError(f"there is no checkpoint in {str(path)!r}: no file {whole.name!r}")
    return [ranks[rank] for rank in sorted(ranks)]


def list_checkpoint(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> list[Entry]:
    """Return the entries of a checkpoint by name; no data file is opened.

    Raises
    ------
    OSError
        The metadata is not there, or cannot be read.
    CheckpointError
        It is damaged, or holds what torch does not put there.
    """
    entries: dict[str, Entry] = {}
    for file in metadata_files(path):
        for entry in entries_of(read_metadata(file, trust_pickle=trust_pickle)):
            other = entries.get(entry.name)
            if other is not None:  # each rank's metadata has that rank's shards
                entry = Entry(
                    entry.name, entry.dtype, entry.shape, entry.nbytes, other.shards + entry.shards
                )
            entries[entry.name] = entry
    return [entries[name] for name in sorted(entries)]


def entries_of(metadata: Metadata) -> list[Entry]:
    """Return what checked metadata describes."""
    infos = metadata.storage_data
    entries = []
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            dtype = described.properties.dtype
            nbytes = math.prod(described.size) * dtype.itemsize
            shards = tuple(
                _shard(chunk.offsets, chunk.sizes, infos.get(MetadataIndex(name, chunk.offsets)))
                for chunk in described.chunks
            )
            kind = str(dtype).removeprefix("torch.")
            entries.append(Entry(name, kind, tuple(described.size), nbytes, shards))
        else:
            shard = _shard((), (), infos.get(MetadataIndex(name)))
            entries.append(Entry(name, None, (), shard.end - shard.begin, (shard,)))
    return entries


def _shard(offsets: tuple[int, ...], sizes: tuple[int, ...], info: _StorageInfo | None) -> Shard:
    if info is None:
        return Shard(tuple(offsets), tuple(sizes), None)
    end = info.offset + info.length
    return Shard(tuple(offsets), tuple(sizes), info.relative_path, info.offset, end)
