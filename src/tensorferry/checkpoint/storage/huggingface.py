"""torch's Hugging Face storage: torch.distributed.checkpoint with checkpoints in the safetensors format.

There are two ways to save. Either rank 0 writes everything, to files that Hugging Face's libraries can load, with an
index; or each rank writes its own parts (``save_distributed``), and the coordinator may then combine them into such
files (``enable_consolidation``).

A part is the piece of a tensor that one rank saves, or that one file holds. An index is a JSON file with the name of
each tensor's file. A :class:`Model` (:mod:`tensorferry.safetensors.sharded`) is a set of new files, written without
names: ``place()`` gives them their names, ``commit()`` also writes the index and removes the old model's files, and
``abort()`` discards them.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader as TorchsReader,
)
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageWriter as TorchsWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tensorferry.base.checks import absolute_path
from tensorferry.base.ranks import checked_broadcast
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.garbage import collection_paused
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import commit, sharing
from tensorferry.checkpoint.storage.assembly import write_tensors
from tensorferry.checkpoint.storage.calls import FolderWriter
from tensorferry.checkpoint.storage.contents import Item, ItemLocator
from tensorferry.checkpoint.storage.reader import PlanLoad
from tensorferry.checkpoint.storage.reading import DataFile
from tensorferry.checkpoint.storage.torch_classes import InPlaceOfTorchs
from tensorferry.checkpoint.storage.writer import completed_future, is_state_memory
from tensorferry.checkpoint.zipformat.blobs import Payload
from tensorferry.safetensors import dtypes, header, index, sources
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.saving import TensorToSave
from tensorferry.safetensors.sharded import Model
from tensorferry.transfer.publication import make_directory
from tensorferry.transfer.remote import Version, as_path, source_path

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        TensorWriteData,
        WriteItem,
    )
    from torch.futures import Future

    from tensorferry.base.checks import Readable
    from tensorferry.base.ranks import Broadcast
    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.storage.calls import Call
    from tensorferry.safetensors.sources import Stored

_VERSION = "1.0"
_SHARDED = "sharded"


class HuggingFaceStorageWriter(FolderWriter, InPlaceOfTorchs, TorchsWriter):
    """Saves checkpoints in the safetensors format, as torch's HuggingFaceStorageWriter does.

    Files have torch's names and contents. Each file appears only when it is complete, and is durable when the save has
    ended. Where rank 0 writes everything, and where files are consolidated, the index refers at every moment either to
    the files of the old checkpoint or to those of the new one.

    Parameters
    ----------
    path : str or PathLike
        The directory; it is created if it is missing.
    fqn_to_index_mapping : dict of str to int, optional
        The number of each tensor's file, from 1; by default there is one file.
    thread_count, thread_count_consolidation : int
        They have no effect: the speed does not depend on them.
    save_distributed : bool
        Whether each rank saves its own parts; otherwise rank 0 saves everything.
    enable_consolidation : bool
        Whether rank 0 combines the parts when all have been saved; the parts are then in the folder "sharded".
        Combining needs no more memory than a save.
    progress : function of a Progress, optional
        As for :class:`FileSystemWriter`.
    **options
        Further arguments of torch's class.

    Attributes
    ----------
    last_save : Throughput or None
        The bytes of this rank's part of the last save, and the time it took to write them; None if it failed.

    Raises
    ------
    TypeError
        The installed torch does not support an argument.

    Notes
    -----
    Objects that are not tensors are refused: torch's writer puts them before the header, and no reader accepts such a
    file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        progress: Listener | None = None,
        **options: Any,
    ) -> None:
        checked_listener(progress)
        wanted = {
            "fqn_to_index_mapping": fqn_to_index_mapping,
            "thread_count": thread_count,
            "save_distributed": save_distributed,
            "enable_consolidation": enable_consolidation,
            "thread_count_consolidation": thread_count_consolidation,
        }
        supported = _supported_arguments(HuggingFaceStorageWriter, TorchsWriter, wanted)
        path = Path(absolute_path(path))
        super().__init__(os.fspath(path), **supported, **options)
        self.last_save: Throughput | None = None
        self._progress = progress
        self.path = self._folder_in(path)

    def _folder_in(self, path: Path) -> Path:
        return path / _SHARDED if self.enable_consolidation else path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory, and refuse objects that the format cannot hold."""
        call = self._begin_call()
        _refuse_objects(plan)
        make_directory(call.folder)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign file names to each rank; add the save's ID and number of files, which ranks write into their files.

        Readers recognize by them that the files of a folder are of one save, and that none is missing.
        """
        if not self.save_distributed and sum(bool(plan.items) for plan in plans) > 1:
            raise CheckpointError(
                "several ranks have tensors to save, and without save_distributed=True their files would have the same "
                "names"
            )
        call = self._current_call()
        call.is_coordinator, call.is_alone = True, len(plans) == 1
        count = sum(
            len(self._split_by_storage_plan(self.fqn_to_index_mapping, plan.items))
            for plan in plans
        )
        save = f"{secrets.token_hex(8)}/{count}"
        return [
            dataclasses.replace(
                plan, storage_data={**(plan.storage_data or {}), sources.SAVE: save}
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to new files; if anything fails, all of them are removed.

        Raises
        ------
        CheckpointError
            Two parts of a tensor are in one file, or a tensor differs from the plan.
        SafetensorError
            The format does not support a dtype.
        StorageError
            The file system refused an operation; the error has the file's name.
        """
        self.last_save = None
        _refuse_objects(plan)
        call, mapping = self._current_call(), self.fqn_to_index_mapping
        # A planner may return a cached plan of another writer's save, in which this is not a dict of ours.
        planned = plan.storage_data
        storage_data: dict[str, Any] = planned if isinstance(planned, dict) else {}
        shard = self._shard(storage_data) if self.save_distributed else None
        highest = max(mapping.values()) if mapping else 1
        files = self._split_by_storage_plan(mapping, plan.items)
        if shard is not None and getattr(planner, "_enable_plan_caching", False):
            # With a cached plan a rank gets the ID of an earlier save, and readers could not tell the two apart.
            if not call.is_alone:
                raise ValueError(
                    "planner: enable_plan_caching=True is not possible with save_distributed=True on several ranks "
                    "(remedy: a planner without it)"
                )
            storage_data = {sources.SAVE: f"{secrets.token_hex(8)}/{len(files)}"}
        total_nbytes = sum(map(_nbytes, plan.items))
        meter = Meter(self._progress, total_nbytes=total_nbytes, total_files=len(files))
        results: list[WriteResult] = []
        model = Model(call.folder, sync=self.sync_files)
        try:
            for number, items in files.items():
                name = file_name(number, highest, shard)
                own = {} if shard is None else {sources.SAVE: storage_data[sources.SAVE]}
                results += _write_file(model, name, items, planner, meter, own)
            call.free_state()
            if shard is None and call.is_coordinator:
                call.model = model  # finish() puts the files in place, with the index
                call.held.callback(model.abort)
            else:
                model.place()
        except BaseException:
            model.abort()
            call.end()
            raise
        if not call.is_coordinator:
            call.end()  # torch calls finish() on the coordinator only
        self.last_save = meter.finish()
        return completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint: put its files in place, or consolidate them.

        Raises
        ------
        CheckpointError
            Parts or files are missing, or several ranks have written a file of the same name.
        StorageError, OSError
            A file could not be read or written.
        """
        call = self._current_call()
        try:
            self._commit(call, metadata, results)
        finally:
            call.end()

    def _commit(self, call: Call, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        path, model = call.folder, call.model
        commit.check_complete(metadata, {result.index for each in results for result in each})
        self._check_files(path, results, set() if model is None else model.names)
        written = [result for each in results for result in each]
        names = {result.index.fqn: result.storage_data.relative_path for result in written}
        files = {result.storage_data.relative_path for result in written}
        if self.save_distributed:
            if self.enable_consolidation:
                names_alone = dict.fromkeys(metadata.state_dict_metadata, 1)
                mapping = self.fqn_to_index_mapping or names_alone
                consolidate(
                    [path / name for name in sorted(files)],
                    path.parent,
                    mapping,
                    sync=self.sync_files,
                )
            # Remove stale files: readers would take files of ranks that no longer exist for parts of this checkpoint,
            # and would use an old index.
            Model(path, sync=self.sync_files).commit(None, placed=files)
            return
        total = sum(result.storage_data.length for result in written)
        with model or Model(path, sync=self.sync_files) as model:
            # If the coordinator has no tensors, another rank has already put the files in place.
            model.commit(names, total, files)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stager": None, "_progress": None}

    def _shard(self, storage_data: dict[str, Any]) -> int:
        """Return the number in the names of this rank's files, from 1."""
        rank = getattr(self, "rank", None)  # torch 2.9 and later
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            return int(storage_data.get("shard_index") or rank + 1)
        return int(rank) + 1

    def _check_files(
        self, folder: Path, results: list[list[WriteResult]], coming: Container[str]
    ) -> None:
        """Check that every file of a save exists or is in ``coming``, and was written by exactly one rank.

        ``coming`` has the names of complete files that the commit will put in place.
        """
        written: set[str] = set()
        for each in results:
            own = {result.storage_data.relative_path for result in each}
            for name in own:
                path = folder / name
                if name in written:
                    raise CheckpointError(
                        "several ranks have written a file of this name (remedy: save_distributed=True)",
                        str(path),
                    )
                if name not in coming and not path.is_file():
                    raise CheckpointError("a file of this save is missing", str(path))
            written |= own

    def _split_by_storage_plan(
        self, mapping: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        """Return the items of each file, by the file's number. A subclass may override this, as with torch's class."""
        found: dict[int, list[WriteItem]] = {}
        for item in items:
            if mapping is not None and item.index.fqn not in mapping:
                raise CheckpointError(
                    "fqn_to_index_mapping has no file number for it",
                    names=(item.index.fqn,),
                )
            found.setdefault(1 if mapping is None else mapping[item.index.fqn], []).append(item)
        return found


def _refuse_objects(plan: SavePlan) -> None:
    objects = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
    if objects:
        raise CheckpointError(
            "the safetensors format holds only tensors, and these are other objects",
            names=tuple(objects),
        )


class HuggingFaceStorageReader(InPlaceOfTorchs, TorchsReader):
    """Loads checkpoints in the safetensors format, as torch's HuggingFaceStorageReader does, but only the needed bytes.

    Parameters
    ----------
    path : str or PathLike
        The folder with the safetensors files of one writer or of several ranks.
    thread_count : int
        It has no effect: the speed does not depend on it.
    progress : function of a Progress, optional
        As for :class:`FileSystemReader`.
    broadcast : False, True or "auto"
        Whether tensors that several ranks of a node need are read only once, in parts, and distributed by the process
        group; as for :class:`FileSystemReader`.
    process_group : ProcessGroup, optional
        The group that is passed to ``load()``; by default the group of all ranks.

    Attributes
    ----------
    nbytes_read : int
        Bytes that the last load read from files, without headers.
    last_load : Throughput or None
        The bytes that the last load delivered to tensors, and the time it took; None if it failed.
    """

    def __init__(
        self,
        path: Readable,
        thread_count: int = 1,
        *,
        progress: Listener | None = None,
        broadcast: Broadcast = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        wanted = {"thread_count": thread_count}
        supported = _supported_arguments(HuggingFaceStorageReader, TorchsReader, wanted)
        super().__init__("", **supported)
        self.path: Any = as_path(source_path(path))
        self.nbytes_read = 0
        self.last_load: Throughput | None = None
        self._progress = checked_listener(progress)
        self._broadcast = checked_broadcast(broadcast)
        self._group = process_group

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for the next load, from another folder if one is given."""
        super().reset()
        if checkpoint_id:
            self.path = as_path(source_path(checkpoint_id, "checkpoint_id"))

    @collection_paused()
    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        """Read and check all headers.

        Raises
        ------
        SafetensorError
            A file violates the format, parts of a tensor do not fit together, or the ranks' files are of different
            saves, after a save was killed.
        FileNotFoundError
            There are no files.
        StorageError
            A file cannot be read.
        """
        folder = as_path(self.path)
        if folder.is_dir() and not any(index.names_in(folder)):
            raise FileNotFoundError(f"there are no safetensors files in the folder {str(folder)!r}")
        tensors, places = scan(sources.contents_of(folder).tensors)
        metadata = Metadata(state_dict_metadata=dict(tensors), storage_data=places)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan what this rank can share of its reads (:class:`.sharing.Offer`)."""

        def versions() -> dict[str, tuple[int, ...]]:
            places = self._places(plan.items)
            wanted = (places.get(item.storage_index) for item in plan.items)
            # Leave out the device number, which may differ between containers for the same file system.
            return {place.relative_path: place.identity[1:] for place in wanted if place}

        return sharing.with_offer(plan, self._broadcast, self._group, self.path, versions)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide which tensors ranks share, and which rank reads each part."""
        items = itertools.chain.from_iterable(plan.items for plan in plans)
        return sharing.with_shares(plans, lambda: LocatedTensors(self._places(items)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors, converted to their dtypes.

        Raises
        ------
        CheckpointError
            A file has been replaced since its header was read.
        StorageError
            A file could not be read.
        AssertionError
            A destination and the slice that is read into it differ in size.
        """
        self.nbytes_read = 0
        self.last_load = None
        meter = Meter(self._progress)
        load = PlanLoad(self._contents(plan.items), planner, meter)
        load.read(plan, self._group)
        self.nbytes_read += load.nbytes_read
        self.last_load = meter.finish()
        return completed_future(None)

    def _contents(self, requests: list[ReadItem]) -> LocatedTensors:
        """Return the data of the requested tensors."""
        return LocatedTensors(self._places(requests))

    def _places(self, requests: Iterable[ReadItem]) -> Mapping[MetadataIndex, PartLocation]:
        """Return the locations of all requested parts; read them from headers if torch's reader made the metadata."""
        places: dict[MetadataIndex, Any] = self.storage_data
        wanted = (places.get(request.storage_index) for request in requests)
        paths = {
            each.relative_path for each in wanted if each and not isinstance(each, PartLocation)
        }
        if not paths:
            return places
        found = {}
        for path in sorted(paths):
            # A load may need only some of the tensors in torch's metadata, so files may be missing.
            here = sources.contents_of([path], problem=lambda _: None)
            for key, part in scan(here.tensors)[1].items():
                known = places.get(key)
                if known is None or known.relative_path != path:
                    continue
                found[key] = part
                if (tuple(known.shape), known.dtype) != (tuple(part.shape), part.dtype):
                    there = f"{part.dtype} of the size {list(part.shape)}"
                    said = f"{known.dtype} of {list(known.shape)}"
                    raise CheckpointError(
                        f"it is {there} in the file, but {said} in the metadata",
                        path,
                        names=(key.fqn,),
                    )
        return {key: each for key, each in places.items() if isinstance(each, PartLocation)} | found


class PartLocation(NamedTuple):  # faster to create than a frozen dataclass
    """The location of a part of a tensor, with the attributes of the class that torch uses for such locations.

    Attributes
    ----------
    relative_path : str
        The file's path.
    shape, dtype
        The part's size and dtype.
    offset, length : int
        The part's byte range in the file.
    identity : Version
        The version of the file from which the header was read.
    order : tuple of int, optional
        The order of dimensions in which the bytes are in C order; by default that of ``shape``.
    conj, neg : bool
        As for :class:`Payload`.
    """

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    length: int
    identity: Version
    order: tuple[int, ...] | None = None
    conj: bool = False
    neg: bool = False


class LocatedTensors(ItemLocator):
    """The data of tensors with known locations, in safetensors files or other formats without chunk checksums."""

    def __init__(self, places: Mapping[MetadataIndex, PartLocation]) -> None:
        self._places = places
        self._identities: dict[str, Version] = {}  # by path, of files with requested items

    def open(self, name: str) -> DataFile:
        """Open a file; CheckpointError if it is not the file whose header was read."""
        file = DataFile(name, name, None, lambda *_: ())
        if Version.of(file.file) != self._identities[name]:
            raise CheckpointError(
                "the file has changed since its header was read: load again", name
            )
        return file

    def item(self, request: ReadItem) -> Item:
        """Return an item of a plan with its location."""
        place: Any = self._places.get(request.storage_index)
        if place is None:
            raise CheckpointError("no file has this part of it", names=(request.storage_index.fqn,))
        path, size, dtype, begin, nbytes, identity, order, conj, neg = place
        self._identities[path] = identity
        order = tuple(range(len(size))) if order is None else order
        payload = Payload(begin, nbytes, dtype, tuple(size), order, conj=conj, neg=neg)
        return Item(request, place, payload)

    def has_only_payload_crc(self, *_: Any) -> bool:
        """Return False: the format does not have checksums."""
        return False


@collection_paused()
def scan(
    held: Mapping[str, tuple[tuple[int, ...], list[Stored]]],
) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, PartLocation]]:
    """Return the tensors of a folder or file as torch's metadata, and the locations of their parts.

    Raises
    ------
    SafetensorError
        torch does not support a dtype.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, PartLocation] = {}
    for name, (shape, parts) in held.items():
        kind, path = parts[0].tensor.dtype, parts[0].path
        dtype = dtypes.torch_dtype(kind)
        size = torch.Size(dtypes.torch_shape(kind, shape, path, name))
        chunks = []
        for path, _, (_, _, own, begin, end), version, at in parts:
            sizes = torch.Size(dtypes.torch_shape(kind, own, path, name))
            offsets = torch.Size(dtypes.torch_shape(kind, at or (0,) * len(sizes), path, name))
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = PartLocation(path, sizes, dtype, begin, end - begin, version)
            places[MetadataIndex(name, offsets)] = place
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return tensors, places


def from_payloads(
    path: str, payloads: Mapping[str, Payload], identity: Version
) -> tuple[dict[str, TensorStorageMetadata], LocatedTensors]:
    """Return the tensors of a file of another format, each stored as one part, as :func:`scan` does, and their data."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, PartLocation] = {}
    for name, payload in payloads.items():
        begin, nbytes, dtype, sizes, order, _, conj, neg = payload
        size, origin = torch.Size(sizes), torch.Size([0] * len(sizes))
        places[MetadataIndex(name, origin)] = PartLocation(
            path, size, dtype, begin, nbytes, identity, order, conj, neg
        )
        chunk = ChunkStorageMetadata(origin, size)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
    return tensors, LocatedTensors(places)


def consolidate(
    paths: Iterable[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    mapping: Mapping[str, int],
    *,
    sync: bool = True,
) -> None:
    """Combine files that ranks have saved into files of complete tensors with an index, in bounded memory.

    Parameters
    ----------
    paths : iterable of paths
        The files, as ``save_distributed=True`` writes them.
    directory : str or PathLike
        The directory for the new files.
    mapping : mapping of str to int
        The number of each tensor's file, from 1.
    sync : bool
        Whether the new files must survive a power cut once this returns.

    Raises
    ------
    CheckpointError
        A tensor or a part of one is missing, or there is a tensor that ``mapping`` does not have.
    SafetensorError, StorageError, OSError
        A file is damaged, or could not be read or written. Existing files are unchanged.
    """
    tensors, places = scan(sources.contents_of(list(paths)).tensors)
    if tensors.keys() != mapping.keys():
        wrong = tuple(sorted(tensors.keys() ^ mapping.keys()))
        raise CheckpointError(
            "the saved tensors are not those of fqn_to_index_mapping", names=wrong
        )
    source = LocatedTensors(places)
    by_file: dict[int, list[str]] = {}
    for name, number in mapping.items():
        by_file.setdefault(number, []).append(name)
    highest = max(by_file, default=1)
    with Model(directory, sync=sync) as model:
        model.check_count(len(by_file))
        total = 0
        weights: dict[str, str] = {}
        for number, names in by_file.items():
            name = file_name(number, highest)
            total += write_file(model, name, {each: tensors[each] for each in names}, source)
            weights |= dict.fromkeys(names, name)
        model.commit(weights, total)


def write_file(
    model: Model,
    name: str,
    tensors: Mapping[str, TensorStorageMetadata],
    source: ItemLocator,
    count: Callable[[int], object] = lambda _: None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file of a model with complete tensors, and return their size in bytes."""
    begin, order, nbytes = header_and_order(tensors, metadata)
    with model.add(name, len(begin) + nbytes) as file:
        file.write_bytes(begin)
        write_tensors(file, order, tensors, source, count)
    return nbytes


def header_and_order(
    tensors: Mapping[str, TensorStorageMetadata], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str], int]:
    """Return a file's header, the order of its tensors, and their size in bytes."""
    entries = entries_of(tensors)
    begin, order = header.build(
        [entry[:3] for entry in entries], {"format": "pt", **(metadata or {})}
    )
    return begin, order, sum(entry.nbytes for entry in entries)


def entries_of(tensors: Mapping[str, TensorStorageMetadata]) -> list[TensorToSave]:
    """Return the header entries of tensors.

    Raises
    ------
    SafetensorError
        The format does not support a dtype.
    """
    entries = []
    for name, described in tensors.items():
        dtype = dtype_of(name, described.properties.dtype)
        entries.append(
            TensorToSave(name, dtype, dtypes.header_shape(described.size, dtype, name), None)
        )
    return entries


def dtype_of(name: str, dtype: torch.dtype) -> str:
    """Return the format's dtype for a tensor; the SafetensorError for an unsupported one has the tensor's name."""
    try:
        return dtypes.of_library(dtype)
    except SafetensorError as error:
        raise SafetensorError(error.reason, name=name) from None


def file_name(number: int, highest: int, shard: int | None = None) -> str:
    """Return torch's name for a file."""
    name = f"model-{number:05d}-of-{highest:05d}{index.FILE_SUFFIX}"
    return name if shard is None else f"shard-{shard:05d}-{name}"


def _write_file(
    model: Model,
    name: str,
    items: list[WriteItem],
    planner: SavePlanner,
    meter: Meter,
    own: Mapping[str, str],
) -> list[WriteResult]:
    """Write a file with a rank's parts of tensors; ``own`` is added to torch's header metadata."""
    by_name: dict[str, WriteItem] = {}
    entries = []
    for item in items:
        each = item.index.fqn
        if each in by_name:
            raise CheckpointError(
                "this rank has two parts of this tensor, and a safetensors file can hold only one tensor of a name",
                names=(each,),
            )
        by_name[each] = item
        dtype = dtype_of(each, _data(item).properties.dtype)
        entries.append((each, dtype, dtypes.header_shape(_data(item).chunk.sizes, dtype, each)))
    parts = {
        each: {sources.OFFSETS: list(_data(item).chunk.offsets)} for each, item in by_name.items()
    }
    metadata = {
        sources.PARTS: json.dumps(parts),
        sources.PARTS_VERSION: _VERSION,
        "format": "pt",
        **own,
    }
    begin, order = header.build(entries, metadata)
    with model.add(name, len(begin) + sum(map(_nbytes, items))) as file:
        file.write_bytes(begin)
        for each in order:
            item = by_name[each]
            tensor = _resolve_data(item, planner)
            kept = tensor.device.type in ("cpu", "cuda") and is_state_memory(tensor, item, planner)
            if tensor.numel():
                file.write(
                    tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu(), kept=kept
                )
            del tensor
            if not kept:  # the planner may reuse the memory for the next tensor
                file.wait_until_copied()
            meter.add(_nbytes(item))
    meter.add(0, files=1)
    return [
        WriteResult(item.index, _nbytes(item), _StorageInfo(name, 0, _nbytes(item)))
        for item in items
    ]


def _resolve_data(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """Return the tensor to write; CheckpointError if it differs from the plan."""
    tensor, planned = planner.resolve_data(item), item.tensor_data
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{item.index.fqn}: the planner returned {type(tensor)} instead of a tensor"
        )
    assert planned is not None
    sizes, dtype = planned.chunk.sizes, planned.properties.dtype
    if tensor.size() != sizes or tensor.dtype != dtype:
        raise CheckpointError(
            f"the planner returned {tensor.dtype} of size {list(tensor.size())} instead of {dtype} of {list(sizes)}",
            names=(item.index.fqn,),
        )
    return tensor.detach()


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize


def _supported_arguments(ours: type, torchs: type, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the installed torch's class supports; the others must have their defaults."""
    taken = inspect.signature(torchs).parameters
    own = inspect.signature(ours).parameters
    for name, value in wanted.items():
        if name not in taken and value != own[name].default:
            raise TypeError(
                f"{name}: torch {torch.__version__}'s {torchs.__name__} has no such argument"
            )
    return {name: value for name, value in wanted.items() if name in taken}
