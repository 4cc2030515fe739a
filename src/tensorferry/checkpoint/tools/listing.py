"""What is in a checkpoint, by its metadata alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorferry.checkpoint.storage.metadata import read_metadata
from tensorferry.checkpoint.tools.findings import Entry, Shard
from tensorferry.checkpoint.tools.kinds import metadata_files
from tensorferry.safetensors.sources import tiles

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata


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


def incomplete(metadata: Metadata) -> Iterator[str]:
    """Yield the names of tensors whose parts do not fill them exactly."""
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            boxes = dict.fromkeys((chunk.offsets, chunk.sizes) for chunk in described.chunks)
            if not tiles(described.size, boxes):
                yield name


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
