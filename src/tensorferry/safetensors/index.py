"""The index of a model that is kept in several safetensors files: which file has which tensor."""

from __future__ import annotations

import os
from typing import Any

from tensorferry.safetensors import small
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.transfers import Path, checked_path

SUFFIX = ".safetensors.index.json"
_MAX_NBYTES = 256 << 20


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the name of the file, beside the index, that has each tensor; and what else the writer has said.

    Raises
    ------
    SafetensorError
        It is no index, or names a file elsewhere.
    OSError
        It cannot be read.
    """
    text = checked_path(path)
    content = small.json_of(small.read(text, _MAX_NBYTES), text, "this is no index")
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise SafetensorError("this is no index: it has no weight_map", text)
    for name, file_name in weights.items():
        if (
            not isinstance(file_name, str)
            or file_name in ("", ".", "..")
            or not _is_path(file_name)
        ):
            raise SafetensorError(f"it is in {shortened(file_name)}, no file", text, name=name)
        if "/" in file_name or "\0" in file_name:
            raise SafetensorError(
                f"its file {shortened(file_name)} is not beside the index", text, name=name
            )
    metadata = content.get("metadata")
    return weights, metadata if isinstance(metadata, dict) else {}


def _is_path(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can have
        return False
    return True
