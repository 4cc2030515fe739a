"""Conversion of checkpoints and files of torch.save to safetensors, and of safetensors to checkpoints.

Tensors are read a few megabytes at a time, in the order of the new files, and written while the next ones are read. The
new files replace existing ones only when all are complete.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.checks import decimal_nbytes
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import assembly, huggingface
from tensorferry.checkpoint.storage.names import TORCH_SUFFIXES
from tensorferry.checkpoint.tools.formats import (
    CHECKPOINTS,
    FORMATS,
    SAFETENSORS,
    format_of,
)
from tensorferry.safetensors import index
from tensorferry.safetensors.saving import refuse_directory, replacing
from tensorferry.transfer.remote import checked_text

if TYPE_CHECKING:
    from tensorferry.base.checks import Readable
    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.tools.formats import ConversionSource

# The suffixes of files in other formats. A folder with such a name would be a mistake.
_OTHER_SUFFIXES = (*TORCH_SUFFIXES, ".npy", ".npz", ".sd", ".safetensor")


def convert(
    source: Readable,
    target: str | os.PathLike[str],
    *,
    max_shard_nbytes: int | str = "5GB",
    tensors_only: bool = False,
    trust_pickle: bool = False,
    progress: Listener | None = None,
) -> Throughput:
    """Convert a checkpoint or a file of torch.save to safetensors, or safetensors to a checkpoint, in bounded memory.

    Parameters
    ----------
    source : str or PathLike, or pair of store and key
        A checkpoint's folder, a file of torch.save, a safetensors file, an index of such files, or a folder with them.
        It may be in a bucket, in any form that :func:`tensorferry.open` accepts.
    target : str or PathLike
        The file to write, if the name ends in ".safetensors", or else the folder. The suffix of another file format,
        such as ".pt" or ".npz", is refused. An existing file or model of the same format is replaced, durably, when
        everything has been written.
    max_shard_nbytes : int or str
        As for :func:`tensorferry.safetensors.sharded.save_sharded`.
    tensors_only : bool
        Leave out what the target cannot hold, rather than refuse it: objects that are not tensors, attributes of
        tensors, and metadata in which safetensors files differ.
    trust_pickle : bool
        As for :class:`tensorferry.checkpoint.FileSystemReader`.
    progress : function of a Progress, optional
        Called during the conversion and at its end, with the bytes and files that are done, and the totals.

    Returns
    -------
    Throughput
        The bytes of all tensors, and the time that the conversion took.

    Raises
    ------
    CheckpointError
        The source is damaged, incomplete or ambiguous, or has objects that the target cannot hold; or the target has a
        model in another format. The message names the problem.
    SafetensorError
        A safetensors file violates the format, or the format does not support a dtype.
    ValueError
        An argument is invalid, or the target has the suffix of another file format.
    FileNotFoundError
        The source does not exist.
    StorageError, OSError
        A file could not be read or written. Existing files of the target are unchanged.

    Notes
    -----
    Tensors that share memory in a file of torch.save are written separately, and conj and neg bits are applied.
    Metadata of safetensors files are kept. In a checkpoint they are an object with the name ``__metadata__``, and
    additional names of tied weights in them become names of the same bytes.
    """
    limit = decimal_nbytes(max_shard_nbytes, "max_shard_nbytes")
    checked_listener(progress)
    path, place = checked_text(source, "source"), Path(os.fsdecode(target))
    if place.name.lower().endswith(_OTHER_SUFFIXES) and not place.is_dir():
        raise ValueError(
            f"target: {str(place)!r} has the suffix of a file that convert() cannot write (remedy: use a name that "
            f"ends in {index.FILE_SUFFIX!r} for a file, or a name without a suffix for a folder)"
        )
    source_format = format_of(path)
    found = source_format.tools.find_source(path, trust_pickle=trust_pickle)
    if found.others and not tensors_only:
        raise CheckpointError(
            "these are not tensors, and would be lost (remedy: leave them out deliberately, with tensors_only=True or "
            "--tensors-only)",
            path,
            names=tuple(found.others),
        )
    target_format = CHECKPOINTS if source_format is SAFETENSORS else SAFETENSORS
    if place.name.endswith(index.FILE_SUFFIX):
        if target_format is CHECKPOINTS:
            raise ValueError(
                f"target: {str(place)!r} is a file name, but safetensors become a checkpoint, which is a folder"
            )
        return _to_file(found, place, progress)
    if place.exists() and not place.is_dir():
        reason = (
            "It is a file, so it cannot be a folder (for a single safetensors file, use a name that ends in "
            f"{index.FILE_SUFFIX!r})"
        )
        raise NotADirectoryError(errno.ENOTDIR, reason, str(place))
    others = (each.marks for each in FORMATS if each is not target_format)
    if place.is_dir() and any(each.name.endswith(sum(others, ())) for each in place.iterdir()):
        raise CheckpointError(
            "the target folder already has a model in another format, which readers would load in place of the new "
            "one (remedy: convert to another folder)",
            str(place),
        )
    written: Throughput = target_format.tools.write(found, place, limit, progress)
    return written


def _to_file(found: ConversionSource, path: Path, progress: Listener | None) -> Throughput:
    begin, order, nbytes = huggingface.header_and_order(found.tensors, found.metadata)
    refuse_directory(path)
    meter = Meter(progress, total_nbytes=nbytes, total_files=1)
    with replacing(path, sync=True, nbytes=len(begin) + nbytes) as new, new.naming_target():
        new.file.write_bytes(begin)
        assembly.write_tensors(new.file, order, found.tensors, found.source, meter.add)
    meter.add(0, files=1)
    return meter.finish()
