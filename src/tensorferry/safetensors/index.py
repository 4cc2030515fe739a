"""The index of a model that is kept in several safetensors files, and what the names of files in a folder say."""

from __future__ import annotations

import os
import re
from typing import Any

from tensorferry.base.checks import Path, can_be_path, is_url
from tensorferry.safetensors import small
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.transfer.remote import place, source_path

FILE_SUFFIX = ".safetensors"
SUFFIX = ".safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = SINGLE_NAME + ".index.json"

COMING = "tensorferry_coming"
"""In the metadata of an interim index: files of the model that is to come, which nothing else names."""

RANKS_FILE = re.compile(r"shard-\d{5,}-(model-\d{5,}-of-\d{5,}\.safetensors)", re.ASCII)
"""Names of files with one rank's parts of tensors, and what follows the number of the rank."""

ONE_OF_SEVERAL = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII | re.DOTALL)
"""Names of files that are a model together: what they begin with, a number from 1 on, and how many there are."""

# Files that a save has set aside, as long as the index names them.
_ASIDE = re.compile(r"\.old-[0-9a-f]{8}\.safetensors$", re.ASCII)
_MAX_NBYTES = 256 << 20


def names_in(folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Return the names of the safetensors files in a folder, and of indexes, each of them sorted."""
    if is_url(folder):
        names = sorted(each.name for each in place(folder).iterdir())
    else:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries)
    files = [name for name in names if name.endswith(FILE_SUFFIX)]
    return files, [name for name in names if name.endswith(SUFFIX)]


def is_aside(name: str) -> bool:
    """Return whether a file has been set aside by a save, and counts only where the index names it."""
    return _ASIDE.search(name) is not None


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the name of the file, beside the index, that has each tensor; and what else the writer has said.

    Raises
    ------
    SafetensorError
        It is no index, or names a file elsewhere.
    OSError
        It cannot be read.
    """
    text = source_path(path)
    content = small.json_of(small.read(text, _MAX_NBYTES), text, "this is no index")
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise SafetensorError("this is no index: it has no weight_map", text)
    for name, file_name in weights.items():
        if (
            not isinstance(file_name, str)
            or file_name in ("", ".", "..")
            or not can_be_path(file_name)
        ):
            raise SafetensorError(f"it is in {shortened(file_name)}, no file", text, name=name)
        if "/" in file_name or "\0" in file_name:
            raise SafetensorError(
                f"its file {shortened(file_name)} is not beside the index", text, name=name
            )
    metadata = content.get("metadata")
    return weights, metadata if isinstance(metadata, dict) else {}
