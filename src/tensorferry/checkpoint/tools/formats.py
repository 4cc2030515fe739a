"""The table of formats: how each is recognized, and which module lists, verifies and converts it.

A format is recognized by names and a few bytes, without torch, so a mistyped path fails fast.
"""

from __future__ import annotations

import importlib
import stat
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.checkpoint.errors import NotACheckpointError
from tensorferry.checkpoint.storage.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    RANK_METADATA,
    metadata_files,
)
from tensorferry.checkpoint.zipformat import zips
from tensorferry.safetensors import index
from tensorferry.safetensors.errors import SNIFFED_NBYTES, wrong_download
from tensorferry.transfer import sidecars
from tensorferry.transfer.python_files import open_python_file
from tensorferry.transfer.remote import as_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from tensorferry.checkpoint.storage.contents import ItemLocator

# The beginning of files that torch.save wrote before torch 1.6: a pickle of this number.
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class ConversionSource(NamedTuple):
    """The contents of a source for `convert`.

    Attributes
    ----------
    tensors : dict of str to TensorStorageMetadata
        The tensors, and the parts in which they are stored.
    source : ItemLocator
        Reads the parts.
    others : list of str
        The names of objects that are not tensors.
    metadata : dict of str to str
        The metadata in safetensors headers. For tied weights they map each additional name of a tensor to the name
        under which the tensor is stored.
    """

    tensors: dict[str, TensorStorageMetadata]
    source: ItemLocator
    others: list[str]
    metadata: dict[str, str] = {}  # noqa: RUF012 (nothing changes it)

    @property
    def aliases(self) -> dict[str, str]:
        """Maps each additional name of a tensor to the name under which the tensor is stored."""
        return {
            name: own
            for name, own in self.metadata.items()
            if own in self.tensors and name not in (*self.tensors, "format")
        }


class Format(NamedTuple):
    """A file format.

    Attributes
    ----------
    module : str
        The module of this package with the format's functions: ``verify`` and ``entries``, as in
        :mod:`tensorferry.checkpoint.tools`, and ``find_source``, which returns a :class:`ConversionSource`.
    is_folder : function of a path
        Whether a folder has this format.
    is_file : function of (path, first bytes)
        Whether a regular file has this format; may raise an error that says what the file is instead.
    marks : tuple of str
        Suffixes of the files by which readers recognize the format.
    """

    module: str
    is_folder: Callable[[str], bool]
    is_file: Callable[[str, bytes], bool]
    marks: tuple[str, ...] = ()

    @property
    def tools(self) -> Any:
        """The module with the format's functions, which is imported on first use."""
        return importlib.import_module(f"{__package__}.{self.module}")


def format_of(path: str) -> Format:
    """Return the format of a file or folder.

    Raises
    ------
    FileNotFoundError
        The path does not exist, or is a folder without a checkpoint.
    NotACheckpointError
        The path is a file of another kind, or of an old format of torch.save, which has no checksums.
    OSError
        The path cannot be read.
    """
    try:
        mode = as_path(path).stat().st_mode
    except FileNotFoundError:
        link = " but a broken symbolic link" if as_path(path).is_symlink() else ""
        raise FileNotFoundError(f"there is nothing at {path!r}{link}") from None
    if stat.S_ISDIR(mode):
        for each in FORMATS:
            if each.is_folder(path):
                return each
        metadata_files(path)  # raises an error that describes the folder's contents
    name = as_path(path).name
    if name.endswith(index.FILE_SUFFIX + sidecars.SUFFIX):
        raise NotACheckpointError("these are the checksums of a file: pass the file", path)
    if name.endswith(DATA_FILE_SUFFIX) or name == METADATA_NAME or RANK_METADATA.fullmatch(name):
        raise NotACheckpointError("it is one file of a checkpoint: pass the folder", path)
    if not stat.S_ISREG(mode):
        raise NotACheckpointError("it is neither a file nor a folder", path)
    if name.endswith(SAFETENSORS.marks):  # even if it is damaged
        return SAFETENSORS
    with open_python_file(path) as file:
        head = file.read(SNIFFED_NBYTES)
    return next(each for each in FORMATS if each.is_file(path, head))


def _has_metadata(path: str) -> bool:
    try:
        return bool(metadata_files(path))
    except FileNotFoundError:
        return False


def _begins_as_safetensors(path: str, head: bytes) -> bool:
    nbytes = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and nbytes + 8 <= as_path(path).stat().st_size


def _is_torch_file(path: str, head: bytes) -> bool:
    """Return True, or raise NotACheckpointError that says what the file is instead; this is the last format."""
    with open_python_file(path) as file:
        read, nbytes = zips.reader_of(file)
        tail = read(max(0, nbytes - zips.END.size), nbytes)
        if _OLD_MAGIC in head[:32]:
            raise NotACheckpointError(
                "it has the format of torch.save before torch 1.6, which has no checksums, so it cannot be verified, "
                "or listed without loading it (remedy: load it with torch.load, and save it again with "
                "tensorferry.checkpoint.save or torch.save)",
                path,
            )
        if other := wrong_download(head):
            raise NotACheckpointError(other, path)
        # One of the two may be damaged: the file counts as an archive if its beginning or its end is that of one.
        if not zips.begins(head) and not zips.ends(tail):
            what = "it is empty" if nbytes == 0 else "it is not a file of torch.save or safetensors"
            raise NotACheckpointError(what, path)
        try:
            names = zips.names(read, nbytes)
        except (zips.UnknownArchiveError, struct.error):
            names = []
    if any(name.partition(b"/")[2] == b"constants.pkl" for name in names):
        raise NotACheckpointError("it is a TorchScript program, not a file of torch.save", path)
    if b"data.pkl" not in head and not any(name.endswith(b"data.pkl") for name in names):
        raise NotACheckpointError("it is a zip archive, but not one of torch.save", path)
    return True


CHECKPOINTS = Format("checkpoints", _has_metadata, lambda *_: False, (METADATA_NAME,))
SAFETENSORS = Format(
    "safetensors_files",
    lambda path: any(index.names_in(path)),
    _begins_as_safetensors,
    (index.FILE_SUFFIX, index.SUFFIX),
)
ARCHIVES = Format("archives", lambda _: False, _is_torch_file)
# The order in which formats are tried.
FORMATS = (CHECKPOINTS, SAFETENSORS, ARCHIVES)
