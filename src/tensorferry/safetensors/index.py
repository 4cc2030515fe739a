"""The index of a model in several safetensors files, and the conventions for file names in a model's folder."""

from __future__ import annotations

import os
import re
from typing import Any

from tensorferry.base.checks import Path, can_be_path, is_url
from tensorferry.safetensors import sidecar
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.transfer.remote import as_path, source_path

FILE_SUFFIX = ".safetensors"
SUFFIX = ".safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = SINGLE_NAME + ".index.json"

PENDING_FILES = "tensorferry_coming"
"""The metadata key of an interim index, which a save writes while it replaces a model (see the module ``sharded``).

An interim index names the files of the old model. Under this key, it also lists the files of the new model.
"""

RANKS_FILE = re.compile(r"shard-\d{5,}-(model-\d{5,}-of-\d{5,}\.safetensors)", re.ASCII)
"""The name of a file with one rank's parts of tensors. The expression's group is the name without the rank's number."""

ONE_OF_SEVERAL = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII | re.DOTALL)
"""The name of one of a model's numbered files. The expression's groups are the prefix, the number (from 1) and the
count of files."""

# The names of an old model's files that a save has renamed because they were in the way of the new model ("set aside",
# see the module `sharded`). Such a file belongs to a model only while an index names it.
_ASIDE = re.compile(r"\.old-[0-9a-f]{8}\.safetensors$", re.ASCII)
_MAX_NBYTES = 256 << 20


def names_in(folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Return the sorted names of the safetensors files in a folder, and the sorted names of its indexes."""
    if is_url(folder):
        names = sorted(each.name for each in as_path(folder).iterdir())
    else:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries)
    files = [name for name in names if name.endswith(FILE_SUFFIX)]
    return files, [name for name in names if name.endswith(SUFFIX)]


def is_aside(name: str) -> bool:
    """Return whether a file has the name of one that a save has set aside."""
    return _ASIDE.search(name) is not None


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a dict from tensors' names to the names of their files in the index's folder, and the index's metadata.

    Raises
    ------
    SafetensorError
        The file is not an index, or names a file outside its folder.
    OSError
        The index cannot be read.
    """
    text = source_path(path)
    content = sidecar.json_of(sidecar.read(text, _MAX_NBYTES), text, "this is not an index")
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise SafetensorError("this is not an index: it has no weight_map", text)
    for name, file_name in weights.items():
        if (
            not isinstance(file_name, str)
            or file_name in ("", ".", "..")
            or not can_be_path(file_name)
        ):
            raise SafetensorError(
                f"its file is {shortened(file_name)}, which is not a file name", text, name=name
            )
        if "/" in file_name or "\0" in file_name:
            raise SafetensorError(
                f"its file {shortened(file_name)} is not in the folder of the index",
                text,
                name=name,
            )
    metadata = content.get("metadata")
    return weights, metadata if isinstance(metadata, dict) else {}
