"""Reading of small untrusted files next to safetensors files: indexes and checksums. Sizes are limited."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import tensorferry
from tensorferry.errors import StorageError
from tensorferry.safetensors.errors import SafetensorError, wrong_download
from tensorferry.safetensors.parsing import is_nested_dangerously


def read(path: str, limit_nbytes: int) -> bytes:
    """Return the content of a file.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    SafetensorError
        The file is larger than ``limit_nbytes``.
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
        return bytes(file.read(bytearray(nbytes)))


def json_of(data: bytes, path: str, otherwise: str) -> Any:
    """Parse JSON. On failure raise SafetensorError with the text ``otherwise`` and the reason."""
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
