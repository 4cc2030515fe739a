"""The table of formats: how each is recognised, and which module lists, verifies, converts and writes it.

What lies at a path is told by names and a few bytes, without torch: a mistyped path is an error at once.
"""

from __future__ import annotations

import importlib
import stat
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tensorferry.checkpoint.errors import NotACheckpointError
from tensorferry.checkpoint.storage.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    RANK_METADATA,
    metadata_files,
)
from tensorferry.checkpoint.zipformat import zips
from tensorferry.safetensors import checksums, index
from tensorferry.safetensors.errors import LOOKED_AT_NBYTES, something_else
from tensorferry.transfer.plain import open_plain
from tensorferry.transfer.remote import place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.storage.assembly import PartsSource
    from tensorferry.checkpoint.tools.findings import Entry, Report

# How torch.save began files before torch 1.6: a pickle of this number.
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class Found(NamedTuple):
    """What a place has for `convert`.

    Attributes
    ----------
    tensors : dict of str to TensorStorageMetadata
        Of which parts they are.
    source : PartsSource
        Where these lie.
    others : list of str
        The names of what is no tensor.
    metadata : dict of str to str
        What safetensors files say beside their tensors, which names are further ones of a tensor included.
    """

    tensors: dict[str, TensorStorageMetadata]
    source: PartsSource
    others: list[str]
    metadata: dict[str, str] = {}  # noqa: RUF012 (nothing changes it)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names, and whose they are."""
        return {
            name: own
            for name, own in self.metadata.items()
            if own in self.tensors and name not in (*self.tensors, "format")
        }


class Tools(Protocol):
    """What the module of a format has; it is imported when one of these is asked for."""

    def verify(
        self, path: str, *, trust_pickle: bool, write_checksums: bool, progress: Listener | None
    ) -> Report:
        """Verify what lies at a path; see :func:`tensorferry.checkpoint.verify`."""

    def entries(self, path: str, *, trust_pickle: bool) -> list[Entry]:
        """Return what is there, by reading as little as possible; see :func:`tensorferry.checkpoint.tools.entries`."""

    def find(self, path: str, *, trust_pickle: bool) -> Found:
        """Return what `convert` can read; CheckpointError where it is damaged."""

    def write(
        self, found: Found, folder: Path, shard_nbytes: int, progress: Listener | None
    ) -> Throughput:
        """Write a folder; only of a format with ``marks``."""


class Format(NamedTuple):
    """A kind of files: one entry of :data:`FORMATS`.

    Attributes
    ----------
    name : str
        As ``convert --to`` has it.
    module : str
        The module with its :class:`Tools`, beside this one.
    suffixes : tuple of str
        A regular file whose name ends so is one, perhaps damaged.
    is_file : function of (path, first bytes)
        Whether another regular file is one; what would be mistaken for one is refused with the reason.
    is_folder : function of a path, optional
        Whether a folder has one.
    marks : tuple of str
        Readers take a folder for one that has a file whose name ends so. Without them `convert` does not write it.
    becomes : str
        What ``convert --to auto`` makes of it.
    keeps_checksums : bool
        Whether `verify` can write checksums beside it.
    """

    name: str
    module: str
    suffixes: tuple[str, ...]
    is_file: Callable[[str, bytes], bool]
    is_folder: Callable[[str], bool] = lambda _: False
    marks: tuple[str, ...] = ()
    becomes: str = "safetensors"
    keeps_checksums: bool = False

    @property
    def tools(self) -> Tools:
        """What can be done with it."""
        tools: Any = importlib.import_module(f"{__package__}.{self.module}")
        return tools  # type: ignore[no-any-return]


def format_of(path: str) -> Format:
    """Return the format of what lies at a path.

    Raises
    ------
    FileNotFoundError
        Nothing, or a folder without a checkpoint.
    NotACheckpointError
        A file of another kind, or one of an old format of torch.save, which has no checksums.
    OSError
        It cannot be read.
    """
    try:
        mode = place(path).stat().st_mode
    except FileNotFoundError:
        link = " but a link that leads nowhere" if place(path).is_symlink() else ""
        raise FileNotFoundError(f"there is nothing at {path!r}{link}") from None
    if stat.S_ISDIR(mode):
        for each in FORMATS:
            if each.is_folder(path):
                return each
        metadata_files(path)  # says what there is instead
    name = place(path).name
    if name.endswith(index.FILE_SUFFIX + checksums.SUFFIX):
        raise NotACheckpointError("these are the checksums of a file: give the file", path)
    if name.endswith(DATA_FILE_SUFFIX) or name == METADATA_NAME or RANK_METADATA.fullmatch(name):
        raise NotACheckpointError("it is one file of a checkpoint: give the folder", path)
    if not stat.S_ISREG(mode):
        raise NotACheckpointError("it is neither a file nor a folder", path)
    for each in FORMATS:
        if name.endswith(each.suffixes):
            return each
    with open_plain(path) as file:
        head = file.read(LOOKED_AT_NBYTES)
    return next(each for each in FORMATS if each.is_file(path, head))


def _has_metadata(path: str) -> bool:
    try:
        return bool(metadata_files(path))
    except FileNotFoundError:
        return False


def _begins_as_safetensors(path: str, head: bytes) -> bool:
    nbytes = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and nbytes + 8 <= place(path).stat().st_size


def _begins_as_numpys(_path: str, head: bytes) -> bool:
    """Return whether a file begins as .npy files do, or is a zip archive that begins with one."""
    first = head[zips.LOCAL_HEADER.size :][: int.from_bytes(head[26:28], "little")]
    return head.startswith(b"\x93NUMPY") or (zips.begins(head) and first.endswith(b".npy"))


def _is_torchs(path: str, head: bytes) -> bool:
    """Return True, or raise NotACheckpointError that says what it is instead: nothing else is left."""
    with open_plain(path) as file:
        read, nbytes = zips.reading(file)
        tail = read(max(0, nbytes - zips.END.size), nbytes)
        if _OLD_MAGIC in head[:32]:
            raise NotACheckpointError(
                "it has the format of torch.save before torch 1.6, which has no checksums: nothing in it can be "
                "verified, or listed without loading it. What torch.load makes of it can be saved again, by "
                "tensorferry.checkpoint.save or by torch.save",
                path,
            )
        if other := something_else(head):
            raise NotACheckpointError(other, path)
        # One of the two may be damaged.
        if not zips.begins(head) and not zips.ends(tail):
            what = (
                "it is empty"
                if nbytes == 0
                else "it is not a file of torch.save's, NumPy's or safetensors'"
            )
            raise NotACheckpointError(what, path)
        try:
            names = zips.names(read, nbytes)
        except (zips.UnknownArchiveError, struct.error):
            names = []
    if any(name.partition(b"/")[2] == b"constants.pkl" for name in names):
        raise NotACheckpointError(
            "it is a program of TorchScript's, not a file of torch.save", path
        )
    if b"data.pkl" not in head and not any(name.endswith(b"data.pkl") for name in names):
        raise NotACheckpointError("it is a zip archive, but none of torch.save's or NumPy's", path)
    return True


# In the order in which they are asked. Another format is an entry here, and the module that it names.
FORMATS = (
    Format("dcp", "checkpoints", (), lambda *_: False, _has_metadata, (METADATA_NAME,)),
    Format(
        "safetensors",
        "safetensors_files",
        (index.FILE_SUFFIX, index.SUFFIX),
        _begins_as_safetensors,
        lambda path: any(index.names_in(path)),
        (index.FILE_SUFFIX, index.SUFFIX),
        becomes="dcp",
        keeps_checksums=True,
    ),
    Format("numpy", "numpy_files", (".npy", ".npz"), _begins_as_numpys),
    Format("torch", "archives", (), _is_torchs),
)
