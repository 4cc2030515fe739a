"""The file names of a checkpoint. No import of torch, which is slow: so a mistyped path is reported at once."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from tensorferry.base.reprs import first_of
from tensorferry.transfer.remote import as_path

if TYPE_CHECKING:
    import os
    from pathlib import Path

METADATA_NAME = ".metadata"
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
"""The file name of the metadata of one rank that saved without the others."""

OWN_NAME = rb"__\d+_[0-9a-f]{16}_\d+\.distcp"
"""A data file of our writer; the name is unique to one save. A pickle of metadata contains these names verbatim."""

TRAILER = re.compile(rb"tensorferry crc32 ([0-9a-f]{8})\n")
"""What our writer puts after the pickle of metadata: the CRC-32 of the pickle."""
TRAILER_NBYTES = 27

METRIC = re.compile(rb"tensorferry metric ([0-9a-f]{16}) crc32 ([0-9a-f]{8})\n")
"""The metric of a checkpoint, before the trailer: a big-endian float64 and its own CRC-32."""
METRIC_NBYTES = 51

DATA_FILE_SUFFIX = ".distcp"

# The usual suffixes of files that torch.save wrote.
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MAX_ENTRIES, _SHOWN = 10_000, 3


def metadata_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the metadata files of a checkpoint: one file, or one for each rank that saved without collectives.

    Raises
    ------
    FileNotFoundError
        The folder has no metadata.
    """
    folder = as_path(path)
    whole = folder / METADATA_NAME
    if whole.exists():
        return [whole]
    if folder.is_dir():
        matches = [(RANK_METADATA.fullmatch(file.name), file) for file in folder.iterdir()]
        ranks = {int(match[1]): file for match, file in matches if match}
        if ranks:
            return [ranks[rank] for rank in sorted(ranks)]
        instead = _describe_contents(folder)
    else:
        instead = "; it is a file" if folder.exists() else "; it does not exist"
    raise FileNotFoundError(
        f"there is no checkpoint in the folder {str(path)!r}: no file {METADATA_NAME!r}{instead}"
    )


def _describe_contents(folder: Path) -> str:
    """Describe what a folder without a checkpoint has instead, which may be what the caller meant to pass."""
    found = sorted(itertools.islice(folder.iterdir(), _MAX_ENTRIES), key=lambda entry: entry.name)
    if not found:
        return "; it is empty"
    folders = [each.name for each in found if (each / METADATA_NAME).is_file()]
    if folders:
        return f"; there are checkpoints in its folders {_first_names(folders)}"
    data_files = [each.name for each in found if each.name.endswith(DATA_FILE_SUFFIX)]
    if data_files:
        return f", but {_first_names(data_files)} (an unfinished save, or the file was lost)"
    files = [each.name for each in found if each.name.endswith(TORCH_SUFFIXES)]
    return f"; pass one of its files instead: {_first_names(files)}" if files else ""


def _first_names(names: list[str]) -> str:
    return first_of([*map(repr, names)], _SHOWN)
