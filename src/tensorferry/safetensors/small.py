"""Small files that stand beside safetensors files, and may be anybody's: never waited for, or read without a limit."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import tensorferry
from tensorferry.errors import StorageError
from tensorferry.safetensors.errors import SafetensorError, something_else
from tensorferry.safetensors.parsing import nested_dangerously


def read(path: str, limit_nbytes: int) -> bytes:
    """Return what is in a file.

    Raises
    ------
    FileNotFoundError
        There is none.
    SafetensorError
        It has more than so many bytes.
    StorageError
        It cannot be read.
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
    """Return what JSON says, or raise SafetensorError with ``otherwise`` and why it is none."""
    try:
        text = data.decode()
        if nested_dangerously(text):
            raise RecursionError("it is nested too deep")
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        why = something_else(data) or error
        raise SafetensorError(f"{otherwise}: {why}", path) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is in it twice")
    return found
