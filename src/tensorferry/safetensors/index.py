"""The index of a model in several safetensors files, and the conventions for file names in a model's folder."""

from __future__ import annotations

import errno
import json
import os
import re
from typing import Any

import tensorferry
from tensorferry.base.checks import Path, can_be_path, is_url
from tensorferry.errors import StorageError
from tensorferry.safetensors.errors import SafetensorError, shortened, wrong_download
from tensorferry.safetensors.parsing import is_nested_dangerously
from tensorferry.transfer.remote import as_path, source_path

FILE_SUFFIX = ".safetensors"
SUFFIX = ".safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = SINGLE_NAME + ".index.json"

RANKS_FILE = re.compile(r"shard-\d{5,}-(model-\d{5,}-of-\d{5,}\.safetensors)", re.ASCII)
"""The name of a file with one rank's parts of tensors. The expression's group is the name without the rank's number."""

ONE_OF_SEVERAL = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII | re.DOTALL)
"""The name of one of a model's numbered files. The expression's groups are the prefix, the number (from 1) and the
count of files."""

# The prefix of the numbered files of a save that has given them names of its own.
_OWN_PREFIX = re.compile(r"model-tf[0-9a-f]{16}", re.ASCII)
_MAX_NBYTES = 256 << 20


def own_name(name: str, token: str) -> str:
    """Return the name that one save gives to a file, so that it replaces no file of another save.

    ``token`` has 16 hexadecimal digits. ``model-00001-of-00002.safetensors`` becomes
    ``model-tf<token>-00001-of-00002.safetensors``, and ``model.safetensors`` is number 1 of 1.
    """
    numbers = "-00001-of-00001.safetensors" if name == SINGLE_NAME else name.removeprefix("model")
    return f"model-tf{token}{numbers}"


def is_own(name: str) -> bool:
    """Return whether only a save of this library gives a file such a name."""
    several = ONE_OF_SEVERAL.fullmatch(name)
    return several is not None and _OWN_PREFIX.fullmatch(several[1]) is not None


def is_usual(name: str) -> bool:
    """Return whether a file has the name that any library gives to a model, or to a part of one."""
    several = ONE_OF_SEVERAL.fullmatch(name)
    is_numbered = several is not None and several[1] == "model"
    return name == SINGLE_NAME or is_numbered or RANKS_FILE.fullmatch(name) is not None


def names_in(folder: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Return the sorted names of the safetensors files in a folder, and the sorted names of its indexes."""
    if is_url(folder):
        names = sorted(each.name for each in as_path(folder).iterdir())
    else:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries)
    files = [name for name in names if name.endswith(FILE_SUFFIX)]
    return files, [name for name in names if name.endswith(SUFFIX)]


def read(path: Path) -> dict[str, str]:
    """Return a dict from tensors' names to the names of their files in the index's folder.

    Raises
    ------
    SafetensorError
        The file is not an index, or names a file outside its folder.
    OSError
        The index cannot be read.
    """
    text = source_path(path)
    content = json_in(text, _MAX_NBYTES, "this is not an index")
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise SafetensorError("this is not an index: it has no weight_map", text)
    for name, file_name in weights.items():
        if (
            not isinstance(file_name, str)
            or file_name in ("", ".", "..")
            or not can_be_path(file_name)
        ):
            reason = f"its file is {shortened(file_name)}, which is not a file name"
            raise SafetensorError(reason, text, name=name)
        if "/" in file_name or "\0" in file_name:
            reason = f"its file {shortened(file_name)} is not in the folder of the index"
            raise SafetensorError(reason, text, name=name)
    return weights


def json_in(path: str, limit_nbytes: int, otherwise: str) -> Any:
    """Return the content of a small untrusted JSON file.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    SafetensorError
        The file is larger than ``limit_nbytes``, or not JSON. The message then begins with ``otherwise``.
    StorageError
        The file cannot be read.
    """
    try:
        file = tensorferry.open(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        raise
    with file:
        nbytes = file.size
        if nbytes > limit_nbytes:
            raise SafetensorError(f"it has {nbytes} bytes, more than {limit_nbytes}", path)
        data = bytes(file.read(bytearray(nbytes)))
    try:
        text = data.decode()
        if is_nested_dangerously(text):
            raise RecursionError("it is nested too deep")
        return json.loads(text, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        why = wrong_download(data) or error
        raise SafetensorError(f"{otherwise}: {why}", path) from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return found
