"""What lies at a path, told by names and a few bytes, without torch: who mistypes a path is told at once."""

from __future__ import annotations

import enum
import itertools
import os
import stat
import struct
from pathlib import Path

from tensorferry.checkpoint.errors import NotACheckpointError
from tensorferry.checkpoint.storage.names import DATA_FILE_SUFFIX, METADATA_NAME, RANK_METADATA
from tensorferry.checkpoint.zipformat import zips
from tensorferry.safetensors import checksums, index
from tensorferry.safetensors.errors import LOOKED_AT_NBYTES, something_else

_FILES = (".pt", ".pth", ".bin", ".ckpt")
# How torch.save began files before torch 1.6: a pickle of this number.
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LOOKED_AT, _SHOWN = 10_000, 3


class Kind(enum.Enum):
    """What can be looked at."""

    CHECKPOINT = enum.auto()
    """A folder with a checkpoint of torch.distributed.checkpoint."""
    ARCHIVE = enum.auto()
    """A file of torch.save's, perhaps damaged."""
    SAFETENSORS = enum.auto()
    """A safetensors file, perhaps damaged; a sharded model's index; or a folder with either."""


def kind_of(path: str) -> Kind:
    """Return what lies at a path.

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
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        link = " but a link that leads nowhere" if Path(path).is_symlink() else ""
        raise FileNotFoundError(f"there is nothing at {path!r}{link}") from None
    if stat.S_ISDIR(mode):
        try:
            metadata_files(path)
        except FileNotFoundError:
            if any(index.names_in(path)):
                return Kind.SAFETENSORS
            raise
        return Kind.CHECKPOINT
    name = Path(path).name
    if name.endswith((index.FILE_SUFFIX, index.SUFFIX)) and stat.S_ISREG(mode):
        return Kind.SAFETENSORS
    if name.endswith(index.FILE_SUFFIX + checksums.SUFFIX):
        raise NotACheckpointError("these are the checksums of a file: give the file", path)
    if name.endswith(DATA_FILE_SUFFIX) or name == METADATA_NAME or RANK_METADATA.fullmatch(name):
        raise NotACheckpointError("it is one file of a checkpoint: give the folder", path)
    if not stat.S_ISREG(mode):
        raise NotACheckpointError("it is neither a file nor a folder", path)
    if _begins_as_safetensors(path):
        return Kind.SAFETENSORS
    _check_file(path)
    return Kind.ARCHIVE


def metadata_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the metadata of a checkpoint: one file, or one for each rank that saved without collectives.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    folder = Path(path)
    whole = folder / METADATA_NAME
    if whole.exists():
        return [whole]
    ranks = {}
    if folder.is_dir():
        for file in folder.iterdir():
            if match := RANK_METADATA.fullmatch(file.name):
                ranks[int(match[1])] = file
    if not ranks:
        instead = _instead(folder) if folder.is_dir() else ""
        raise FileNotFoundError(
            f"there is no checkpoint in the folder {str(path)!r}: no file {METADATA_NAME!r}{instead}"
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _instead(folder: Path) -> str:
    """Say what a folder without a checkpoint has that may have been meant."""
    with os.scandir(folder) as entries:
        found = sorted(itertools.islice(entries, _LOOKED_AT), key=lambda entry: entry.name)
    if not found:
        return "; it is empty"
    folders = [each.name for each in found if (folder / each.name / METADATA_NAME).is_file()]
    if folders:
        return f"; there are checkpoints in its folders {_some(folders)}"
    data_files = [each.name for each in found if each.name.endswith(DATA_FILE_SUFFIX)]
    if data_files:
        return f", but {_some(data_files)}: a save that did not end, or the file was lost"
    files = [each.name for each in found if each.name.endswith(_FILES)]
    return f"; its files may be given one by one: {_some(files)}" if files else ""


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _begins_as_safetensors(path: str) -> bool:
    """Return whether a file, whatever its name, begins as those of the format do."""
    with open(path, "rb", buffering=0) as file:
        begin = file.read(9)
        nbytes = int.from_bytes(begin[:8], "little")
        return begin[8:] == b"{" and nbytes + 8 <= os.fstat(file.fileno()).st_size


def _check_file(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        read, nbytes = zips.reading(file.fileno())
        head, tail = read(0, LOOKED_AT_NBYTES), read(max(0, nbytes - zips.END.size), nbytes)
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
                else "it is neither a file of torch.save's nor a safetensors file"
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
        raise NotACheckpointError("it is a zip archive, but none of torch.save's", path)
