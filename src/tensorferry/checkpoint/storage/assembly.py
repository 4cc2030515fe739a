"""Assembly of tensors from parts in several files; the tensors are written one after the other, in bounded memory.

A box is memory for a small part of a new tensor. Read items, as torch's planners make them, fill it from the stored
parts that it overlaps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tensorferry.base.ranges import slabs
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage.reader import read_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.planner import ReadItem

    from tensorferry.checkpoint.storage.contents import ItemLocator
    from tensorferry.transfer.new_file import NewFile

# Tensors are cut into boxes of up to _BOX_NBYTES. Boxes are read in batches of at most _BATCH_COUNT boxes and
# _BATCH_NBYTES bytes. A batch is read while the previous batch is written.
_BATCH_NBYTES = 24 << 20
_BOX_NBYTES = 8 << 20
_BATCH_COUNT = 1024


def write_tensors(
    file: NewFile,
    names: Iterable[str],
    tensors: Mapping[str, TensorStorageMetadata],
    source: ItemLocator,
    count: Callable[[int], object] = lambda _: None,
) -> None:
    """Write complete tensors, in C order, one after the other.

    Parameters
    ----------
    file : NewFile
        The file to write to.
    names : iterable of str
        The tensors, in the order in which they are written.
    tensors : mapping of str to TensorStorageMetadata
        The parts of each tensor.
    source : ItemLocator
        The files that hold the parts.
    count : function of an int, optional
        Called with the number of bytes that have been read.

    Raises
    ------
    CheckpointError
        A part is missing or damaged.
    StorageError
        A file could not be read or written.
    """
    boxes: list[torch.Tensor] = []
    requests: list[tuple[ReadItem, torch.Tensor]] = []
    nbytes = 0

    def flush() -> None:
        nonlocal nbytes
        read_boxes(source, requests)
        # write() copies to the stream's own buffers, which are written while the next batch is read.
        file.write(boxes)
        file.wait_until_copied()
        count(nbytes)
        boxes.clear()
        requests.clear()
        nbytes = 0

    for name in names:
        for box, wanted in _boxes(name, tensors[name]):
            if nbytes + box.nbytes > _BATCH_NBYTES or len(boxes) >= _BATCH_COUNT:
                flush()
            boxes.append(box)
            requests += wanted
            nbytes += box.nbytes
    if boxes:
        flush()


def read_box(
    name: str, described: TensorStorageMetadata, chunk: ChunkStorageMetadata, source: ItemLocator
) -> torch.Tensor:
    """Return a part of a tensor, read into new memory; errors as for :func:`write_tensors`."""
    box, requests = _box(name, described, chunk)
    read_boxes(source, requests)
    return box


def _boxes(
    name: str, described: TensorStorageMetadata
) -> Iterator[tuple[torch.Tensor, list[tuple[ReadItem, torch.Tensor]]]]:
    """Return memory for a tensor's elements, in order, with the read items for the parts of that memory."""
    sizes, dtype = tuple(described.size), described.properties.dtype
    whole = (0,) * len(sizes), sizes
    for slab in slabs(sizes, *whole, max_span=max(1, _BOX_NBYTES // dtype.itemsize), max_gap=0):
        chunk = ChunkStorageMetadata(torch.Size(slab.offsets), torch.Size(slab.lengths))
        yield _box(name, described, chunk)


def _box(
    name: str, described: TensorStorageMetadata, chunk: ChunkStorageMetadata
) -> tuple[torch.Tensor, list[tuple[ReadItem, torch.Tensor]]]:
    box = torch.empty(chunk.sizes, dtype=described.properties.dtype, device="cpu")
    wanted = []
    for request in create_read_items_for_chunk_list(name, described, [chunk]):
        place = tuple(
            slice(offset, offset + length)
            for offset, length in zip(request.dest_offsets, request.lengths, strict=True)
        )
        wanted.append((request, box[place] if place else box))
    if sum(math.prod(request.lengths) for request, _ in wanted) < box.numel():
        raise CheckpointError(
            f"parts of it are missing: {list(chunk.sizes)} at {list(chunk.offsets)} is not completely covered",
            names=(name,),
        )
    return box, wanted
