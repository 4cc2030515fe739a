"""From one format to another: checkpoints of torch.distributed.checkpoint, safetensors, and files of torch.save's.

Tensors are read a few megabytes at a time, in the order in which the new files have them, and written while the next
ones are read. What is new takes its place when all of it is there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tensorferry.base.checks import decimal_nbytes, one_of
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import assembly, huggingface
from tensorferry.checkpoint.tools.formats import FORMATS, format_of
from tensorferry.safetensors import index
from tensorferry.safetensors.saving import refuse_directory, replacing
from tensorferry.transfer.remote import text_of

if TYPE_CHECKING:
    from tensorferry.base.checks import Readable
    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.tools.formats import Found

To = Literal["auto", "dcp", "safetensors"]


def convert(
    source: Readable,
    target: str | os.PathLike[str],
    *,
    to: To = "auto",
    max_shard_nbytes: int | str = "5GB",
    tensors_only: bool = False,
    trust_pickle: bool = False,
    progress: Listener | None = None,
) -> Throughput:
    """Convert a checkpoint, a model in safetensors files, or a file of torch.save's; in bounded memory.

    Parameters
    ----------
    source : str or PathLike, or pair of store and key
        A checkpoint's folder, a file of torch.save's, a safetensors file, an index of such, or a folder with them. Also
        in a bucket, as :func:`tensorferry.open` has them.
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
    written = {each.name: each for each in FORMATS if each.marks}
    one_of(to, "to", ("auto", *written))
    limit = decimal_nbytes(max_shard_nbytes, "max_shard_nbytes")
    checked_listener(progress)
    path, place = text_of(source, "source"), Path(os.fsdecode(target))
    source_format = format_of(path)
    found = source_format.tools.find(path, trust_pickle=trust_pickle)
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
    target_format = written[source_format.becomes if to == "auto" else to]
    others = tuple(mark for each in FORMATS if each is not target_format for mark in each.marks)
    if place.is_dir() and any(each.name.endswith(others) for each in place.iterdir()):
        raise CheckpointError(
            "it has what readers would take for the model, in another format: convert to another folder",
            str(place),
        )
    return target_format.tools.write(found, place, limit, progress)


def _to_file(found: Found, path: Path, progress: Listener | None) -> Throughput:
    begin, order, nbytes = huggingface.laid_out(found.tensors, found.metadata)
    refuse_directory(path)
    meter = Meter(progress, total_nbytes=nbytes, total_files=1)
    with replacing(path, sync=True, nbytes=len(begin) + nbytes) as new, new.named():
        new.file.write_bytes(begin)
        assembly.write_tensors(new.file, order, found.tensors, found.source, meter.add)
    meter.add(0, files=1)
    return meter.finish()
