"""The dcp format in the table of formats: `convert` reads and writes torch.distributed.checkpoint by this module."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from tensorferry.base.ranges import slabs
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage import assembly
from tensorferry.checkpoint.storage.contents import Contents
from tensorferry.checkpoint.storage.metadata import read_metadata
from tensorferry.checkpoint.storage.names import METADATA_NAME, metadata_files
from tensorferry.checkpoint.storage.reader import read_items
from tensorferry.checkpoint.storage.writer import FileSystemWriter
from tensorferry.checkpoint.tools.audit import entries, incomplete, verify
from tensorferry.checkpoint.tools.formats import ConversionSource
from tensorferry.safetensors import index
from tensorferry.safetensors.parsing import METADATA

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from tensorferry.checkpoint.progress import Listener, Throughput

__all__ = ["entries", "find_source", "verify", "write"]

# In a checkpoint, larger tensors are split into chunks (torch's term for a saved part) of at most this size.
_CHUNK_NBYTES = 16 << 20


def find_source(path: str, *, trust_pickle: bool) -> ConversionSource:
    """Return the contents to convert."""
    if any(index.names_in(path)):
        raise CheckpointError(
            "it has both a checkpoint and safetensors files, so the source is ambiguous (remedy: move one of them "
            "away)",
            path,
        )
    found = metadata_files(path)
    if len(found) > 1 or found[0].name != METADATA_NAME:
        raise CheckpointError(
            "its ranks saved separately (use_collectives=False), so the source is ambiguous",
            path,
        )
    metadata = read_metadata(found[0], trust_pickle=trust_pickle)
    contents = Contents(path, metadata, trusted=trust_pickle)
    names = {info.relative_path for info in metadata.storage_data.values()}
    if not all(map(contents.has_checksums, names)):
        # Some files have checksums of complete tensors only, but the conversion reads parts of tensors: verify the
        # whole checkpoint before the conversion.
        verify(path, trust_pickle=trust_pickle).require_sound()
    if partly := tuple(incomplete(metadata)):
        raise CheckpointError("parts of it are missing or overlap", path, names=partly)
    described = metadata.state_dict_metadata.items()
    tensors = {name: one for name, one in described if isinstance(one, TensorStorageMetadata)}
    others = [name for name, _ in described if name not in tensors]
    metadata_texts: dict[str, str] = {}
    if METADATA in others and (text := _text_of(METADATA, contents)) is not None:
        others.remove(METADATA)
        metadata_texts = text

    def places(name: str) -> list[Any]:
        indexes = (MetadataIndex(name, chunk.offsets) for chunk in tensors[name].chunks)
        infos = map(metadata.storage_data.get, indexes)
        return [info and (info.relative_path, info.offset) for info in infos]

    for name, own in metadata_texts.items():
        if name in tensors and own in tensors and name != own and places(name) == places(own):
            del tensors[name]  # an additional name for the same bytes
    return ConversionSource(tensors, contents, others, metadata=metadata_texts)


def _text_of(name: str, contents: Contents) -> dict[str, str] | None:
    """Return an object of a checkpoint if it is a dict of text, otherwise None."""
    found: Any = None

    class Planner:
        def load_bytes(self, _request: ReadItem, value: io.BytesIO) -> None:
            nonlocal found
            with contextlib.suppress(pickle.UnpicklingError):  # another kind of object
                found = torch.load(value, weights_only=True)

    planner: Any = Planner()
    where, nothing = MetadataIndex(name), torch.Size()
    request = ReadItem(LoadItemType.BYTE_IO, where, nothing, where, nothing, nothing)
    read_items(contents, planner, [request])
    is_text = type(found) is dict and {*map(type, found), *map(type, found.values())} <= {str}
    return found if is_text else None


def write(
    found: ConversionSource, folder: Path, _shard_nbytes: int, progress: Listener | None
) -> Throughput:
    """Write a checkpoint."""
    writer = _Writer(folder, overwrite=True, progress=progress)
    writer.aliases = found.aliases
    try:
        save({}, storage_writer=writer, planner=_Planner(found), no_dist=True)
    except CheckpointException as error:
        # There is only one process, and its failure is clearer without torch's wrapper.
        (failure, *_), *_ = error.failures.values()
        raise failure from None
    assert writer.last_save is not None
    return writer.last_save


class _Writer(FileSystemWriter):
    """A writer that also saves additional names of tensors (``aliases``), which refer to the same bytes."""

    aliases: dict[str, str]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        more = []
        for name, own in self.aliases.items():
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[own]
            more += [
                dataclasses.replace(
                    each,
                    index=MetadataIndex(name, each.index.offset),
                    storage_data=copy.copy(each.storage_data),
                )
                for written in results
                for each in written
                if each.index.fqn == own
            ]
        super().finish(metadata, [*results, more])


class _Planner(DefaultSavePlanner):
    """A planner that reads each tensor only when it is written, and splits large tensors into several chunks."""

    def __init__(self, found: ConversionSource) -> None:
        super().__init__()
        self._found = found

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, described in self._found.tensors.items():
            sizes, properties = described.size, described.properties
            most = max(1, _CHUNK_NBYTES // properties.dtype.itemsize)
            origin = (0,) * len(sizes)
            boxes = [
                (slab.offsets, slab.lengths)
                for slab in slabs(tuple(sizes), origin, tuple(sizes), max_span=most, max_gap=0)
            ]
            for offsets, lengths in boxes or [(origin, sizes)]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
                data = TensorWriteData(chunk, TensorProperties(dtype=properties.dtype), sizes)
                place = MetadataIndex(name, chunk.offsets)
                items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
        if self._found.metadata.items() - {("format", "pt")}:
            items.append(WriteItem(MetadataIndex(METADATA), WriteItemType.BYTE_IO))
        keys = {name: (name,) for name in (*self._found.tensors, *self._found.aliases)}
        self.plan = SavePlan(items, planner_data=keys)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(self._found.metadata, stream)
            return stream
        chunk = write_item.tensor_data.chunk
        name = write_item.index.fqn
        return assembly.read_box(name, self._found.tensors[name], chunk, self._found.source)
