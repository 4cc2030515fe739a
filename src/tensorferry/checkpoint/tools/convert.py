"""From one format to another: checkpoints of torch.distributed.checkpoint, safetensors, and files of torch.save's.

Tensors are read a few megabytes at a time, in the order in which the new files have them, and written while the next
ones are read. What is new takes its place when all of it is there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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

from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import assembly, huggingface
from tensorferry.checkpoint.storage.contents import Contents
from tensorferry.checkpoint.storage.metadata import read_metadata
from tensorferry.checkpoint.storage.names import METADATA_NAME
from tensorferry.checkpoint.storage.reader import Load
from tensorferry.checkpoint.storage.reading import Reading
from tensorferry.checkpoint.storage.writer import FileSystemWriter
from tensorferry.checkpoint.tools import audit, files, listing, safetensors_files
from tensorferry.checkpoint.tools.kinds import Kind, kind_of, metadata_files
from tensorferry.checkpoint.tools.trees import MAX_NAME
from tensorferry.checkpoint.zipformat.ranges import slabs
from tensorferry.safetensors import checksums, index, sharded, sources
from tensorferry.safetensors.parsing import METADATA
from tensorferry.safetensors.saving import refuse_directory, replacing
from tensorferry.safetensors.version import Version

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.storage.assembly import Source
    from tensorferry.checkpoint.tools.findings import Report

Format = Literal["auto", "dcp", "safetensors"]
FORMATS = ("auto", "dcp", "safetensors")
# Larger tensors become chunks of at most so many bytes in a checkpoint.
_CHUNK_NBYTES = 16 << 20


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format = "auto",
    max_shard_nbytes: int | str = "5GB",
    tensors_only: bool = False,
    trust_pickle: bool = False,
    progress: Listener | None = None,
) -> Throughput:
    """Convert a checkpoint, a model in safetensors files, or a file of torch.save's; in bounded memory.

    Parameters
    ----------
    source : str or PathLike
        A checkpoint's folder, a file of torch.save's, a safetensors file, an index of such, or a folder with them.
    target : str or PathLike
        Where to. A name that ends in ".safetensors" becomes one file, any other one a folder. What is there of the same
        kind is replaced when all is written, and durably.
    to : "auto", "dcp" or "safetensors"
        What the folder gets. "auto": a checkpoint of safetensors, and safetensors of all else.
    max_shard_nbytes : int or str
        As for :func:`tensorferry.safetensors.sharded.save_sharded`.
    tensors_only : bool
        Leave out what is not a tensor, rather than refuse it: attributes of tensors, and metadata in which safetensors
        files differ, as well.
    trust_pickle : bool
        As for :class:`tensorferry.checkpoint.FileSystemReader`.
    progress : function of a Progress, optional
        Called now and then, and at the end: bytes and files done, and in all.

    Returns
    -------
    Throughput
        How many bytes of tensors there were, and in what time.

    Raises
    ------
    CheckpointError
        The source is damaged or incomplete, could be read in two ways, or has what the target cannot hold; or the
        target has a model in another format. The message names it.
    SafetensorError
        A safetensors file breaks a rule of the format, or the format has no such dtype.
    FileNotFoundError
        There is nothing to convert.
    StorageError, OSError
        Something could not be read or written. What was there at the target has stayed.

    Notes
    -----
    Tensors that share memory in a file of torch.save's are written each by itself, and conj and neg bits are applied.
    Metadata of safetensors files are kept; in a checkpoint they are an object called ``__metadata__``, and the further
    names of tied weights that they have are names of the same bytes.
    """
    if to not in FORMATS:
        raise ValueError(f"to: {to!r} is none of {', '.join(FORMATS)}")
    limit = sharded.shard_nbytes(max_shard_nbytes)
    checked_listener(progress)
    path, place = os.fsdecode(source), Path(os.fsdecode(target))
    found = _look(path, trust_pickle=trust_pickle)
    if found.others and not tensors_only:
        raise CheckpointError(
            "these are no tensors, and would be lost (remedy: leave them out on purpose, with tensors_only=True or "
            "--tensors-only)",
            path,
            names=tuple(found.others),
        )
    if place.name.endswith(index.FILE_SUFFIX):
        if to == "dcp":
            raise ValueError(
                f"target: {str(place)!r} is a file's name, and a checkpoint is a folder"
            )
        return _to_file(found, place, progress)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(
            f"{str(place)!r} is a file, and no folder can be there (for a file of safetensors, let its name end in "
            f"{index.FILE_SUFFIX!r})"
        )
    to_checkpoint = to == "dcp" or (to == "auto" and found.is_safetensors)
    suffixes = (index.FILE_SUFFIX, index.SUFFIX) if to_checkpoint else METADATA_NAME
    if place.is_dir() and any(each.name.endswith(suffixes) for each in place.iterdir()):
        raise CheckpointError(
            "it has what readers would take for the model, in another format: convert to another folder",
            str(place),
        )
    if to_checkpoint:
        return _to_checkpoint(found, place, progress)
    return _to_model(found, place, limit, progress)


class _Found(NamedTuple):
    """What there is to convert.

    Attributes
    ----------
    tensors : dict of str to TensorStorageMetadata
        Of which parts they are.
    source : Source
        Where these lie.
    others : list of str
        The names of what is no tensor.
    is_safetensors : bool
        What files these are.
    metadata : dict of str to str
        What safetensors files say beside their tensors, which names are further ones of a tensor included.
    """

    tensors: dict[str, TensorStorageMetadata]
    source: Source
    others: list[str]
    is_safetensors: bool = False
    metadata: dict[str, str] = {}  # noqa: RUF012 (nothing changes it)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names, and whose they are."""
        return {
            name: own
            for name, own in self.metadata.items()
            if own in self.tensors and name not in (*self.tensors, "format")
        }


def _look(path: str, *, trust_pickle: bool) -> _Found:
    kind = kind_of(path)
    if kind is Kind.ARCHIVE:
        return _of_archive(path)
    if kind is Kind.CHECKPOINT:
        if any(index.names_in(path)):
            raise CheckpointError(
                "it has a checkpoint and safetensors files, and which are meant is not known (remedy: move the others "
                "away)",
                path,
            )
        return _of_checkpoint(path, trust_pickle=trust_pickle)
    file_name = Path(path).name if Path(path).is_file() else ""
    several = index.ONE_OF_SEVERAL.fullmatch(file_name)
    if index.RANKS_FILE.fullmatch(file_name) or (several and int(several[3]) > 1):
        raise CheckpointError("it is one file of several: give their folder, or the index", path)
    held = sources.hold(path, complete=True)
    if any(Path(checksums.path_of(each)).exists() for each in sources.files_of(path).paths):
        _refuse_damage(safetensors_files.verify(path))
    tensors, places = huggingface.scan(held.tensors)
    others = [f"{METADATA}.{key}" for key in sorted(held.differing)]
    metadata = {key: text for key, text in held.metadata.items() if key not in held.differing}
    return _Found(tensors, huggingface.SafetensorsFiles(places), others, True, metadata)


def _of_checkpoint(path: str, *, trust_pickle: bool) -> _Found:
    found = metadata_files(path)
    if len(found) > 1 or found[0].name != ".metadata":
        raise CheckpointError(
            "its ranks saved by themselves (use_collectives=False), and which of them is meant is not known",
            path,
        )
    metadata = read_metadata(found[0], trust_pickle=trust_pickle)
    contents = Contents(path, metadata, trusted=trust_pickle)
    names = {info.relative_path for info in metadata.storage_data.values()}
    if not all(map(contents.has_checksums, names)):
        # Its checksums are of whole tensors, of which parts are read here.
        _refuse_damage(audit.verify(path, trust_pickle=trust_pickle))
    incomplete = tuple(listing.incomplete(metadata))
    if incomplete:
        raise CheckpointError("parts of it are missing, or there twice", path, names=incomplete)
    tensors, others = {}, []
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            tensors[name] = described
        else:
            others.append(name)
    said: dict[str, str] = {}
    if METADATA in others and (text := _text_of(METADATA, contents)) is not None:
        others.remove(METADATA)
        said = text

    def places(name: str) -> list[Any]:
        indexes = (MetadataIndex(name, chunk.offsets) for chunk in tensors[name].chunks)
        infos = map(metadata.storage_data.get, indexes)
        return [info and (info.relative_path, info.offset) for info in infos]

    for name, own in said.items():
        if name in tensors and own in tensors and name != own and places(name) == places(own):
            del tensors[name]  # it is a further name of the same bytes, as it was before
    return _Found(tensors, contents, others, metadata=said)


def _text_of(name: str, contents: Contents) -> dict[str, str] | None:
    """Return an object of a checkpoint, if it is a dict of text."""
    found: Any = None

    class Planner:
        def load_bytes(self, _request: ReadItem, value: io.BytesIO) -> None:
            nonlocal found
            with contextlib.suppress(pickle.UnpicklingError):  # then it is something else
                found = torch.load(value, weights_only=True)

    planner: Any = Planner()
    where, nothing = MetadataIndex(name), torch.Size()
    request = ReadItem(LoadItemType.BYTE_IO, where, nothing, where, nothing, nothing)
    with Reading() as reading:
        load = Load(contents, reading, planner, lambda _: None)
        contents.read(reading, contents.locate([request]), load.begin)
    is_text = type(found) is dict and {*map(type, found), *map(type, found.values())} <= {str}
    return found if is_text else None


def _of_archive(path: str) -> _Found:
    _refuse_damage(files.verify(path))
    payloads, others = files.payloads(path)
    unclear = tuple(name for name in payloads if len(name) >= MAX_NAME or "?" in name.split("."))
    if unclear:
        raise CheckpointError(
            "their names are too long, or their keys are no text", path, names=unclear
        )
    identity = Version.at(path)
    tensors, places = {}, {}
    for name, payload in payloads.items():
        begin, nbytes, dtype, sizes, order, _, conj, neg = payload
        size = torch.Size(sizes)
        origin = torch.Size([0] * len(size))
        places[MetadataIndex(name, origin)] = huggingface.Place(
            path, size, dtype, begin, nbytes, identity, order, conj, neg
        )
        chunk = ChunkStorageMetadata(origin, size)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
    return _Found(tensors, huggingface.SafetensorsFiles(places), others)


def _refuse_damage(report: Report) -> None:
    if not report.sound:
        raise report.problems[0]


def _to_file(found: _Found, path: Path, progress: Listener | None) -> Throughput:
    begin, order, nbytes = huggingface.laid_out(found.tensors, found.metadata)
    refuse_directory(path)
    meter = Meter(progress, total_nbytes=nbytes, total_files=1)
    with replacing(path, sync=True, nbytes=len(begin) + nbytes) as new, new.named():
        new.file.write_bytes(begin)
        assembly.write_tensors(new.file, order, found.tensors, found.source, meter.add)
    meter.add(0, files=1)
    return meter.finish()


def _to_model(found: _Found, directory: Path, limit: int, progress: Listener | None) -> Throughput:
    shards = sharded.split(huggingface.entries_of(found.tensors), limit)
    nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)
    meter = Meter(progress, total_nbytes=nbytes, total_files=len(shards))
    with sharded.Model(directory, sync=True) as model:
        model.check_count(len(shards))
        for name, entries in shards.items():
            tensors = {entry.name: found.tensors[entry.name] for entry in entries}
            huggingface.write_whole(model, name, tensors, found.source, meter.add, found.metadata)
            meter.add(0, files=1)
        weights = {entry.name: name for name, entries in shards.items() for entry in entries}
        model.commit(None if len(shards) == 1 else sharded.index_of(weights, nbytes))
    return meter.finish()


def _to_checkpoint(found: _Found, directory: Path, progress: Listener | None) -> Throughput:
    writer = _Writer(directory, overwrite=True, progress=progress)
    writer.aliases = found.aliases
    try:
        save({}, storage_writer=writer, planner=_Planner(found), no_dist=True)
    except CheckpointException as error:
        # One process has one failure, which says more by itself.
        (failure, *_), *_ = error.failures.values()
        raise failure from None
    assert writer.last_save is not None
    return writer.last_save


class _Writer(FileSystemWriter):
    """Gives tensors further names, whose bytes are the same."""

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
    """Saves tensors that it reads when they are asked for, the larger ones in several chunks."""

    def __init__(self, found: _Found) -> None:
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
