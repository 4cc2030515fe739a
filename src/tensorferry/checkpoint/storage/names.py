"""What files of a checkpoint are called. A mistyped path is an error before torch is imported."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from tensorferry.transfer.remote import place

if TYPE_CHECKING:
    import os
    from pathlib import Path

METADATA_NAME = ".metadata"
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
"""What the metadata of one rank that saved without the others is called."""

OWN_NAME = rb"__\d+_[0-9a-f]{16}_\d+\.distcp"
"""A data file of our writer; no other save used that name. Names stand in metadata as they are."""

DATA_FILE_SUFFIX = ".distcp"

_FILES = (".pt", ".pth", ".bin", ".ckpt")
_LOOKED_AT, _SHOWN = 10_000, 3


def metadata_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the metadata of a checkpoint: one file, or one for each rank that saved without collectives.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    folder = place(path)
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
    found = sorted(itertools.islice(folder.iterdir(), _LOOKED_AT), key=lambda entry: entry.name)
    if not found:
        return "; it is empty"
    folders = [each.name for each in found if (each / METADATA_NAME).is_file()]
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
