"""Sidecars: small files with the checksums of another file, next to it.

Safetensors files have them (:mod:`tensorferry.safetensors.checksums`). A sidecar describes one content of its file, so
whoever replaces this content also removes the sidecar.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorferry.base.checks import Path as AnyPath

SUFFIX = ".crc32"
"""The end of a sidecar's name. The beginning is the name of the file to which the sidecar belongs."""


def is_usual(path: AnyPath) -> bool:
    """Return whether a file has a name with which it may have a sidecar, whatever its content is."""
    return os.fsdecode(path).endswith(".safetensors")


def paths_of(path: AnyPath) -> list[Path]:
    """Return the possible sidecars of a file: beside it, and beside the file to which a symbolic link leads."""
    asked = Path(os.fsdecode(path))
    files = {asked.parent.resolve() / asked.name, asked.resolve()}
    return [each.with_name(each.name + SUFFIX) for each in files]


def remove(path: AnyPath) -> None:
    """Remove the sidecars of a file of which the whole content was replaced in place."""
    if is_usual(path):
        for each in paths_of(path):
            # A sidecar that remains does not lead to wrong bytes: readers report the file as damaged.
            with contextlib.suppress(OSError):
                each.unlink()
