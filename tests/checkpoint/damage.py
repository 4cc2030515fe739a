"""Damages files, and runs the commands that have to detect it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from tensorferry.cli.app import app

if TYPE_CHECKING:
    import pathlib

# Flipped in turn, of all bits of a small file: every one of so many.
BITS_APART = int(os.environ.get("TENSORFERRY_TEST_BITS_APART", "13"))


def flipped(data: bytes, bit: int) -> bytes:
    """The same with one bit changed."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def flip(file: pathlib.Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        changed = flipped(stream.read(1), bit % 8)
        stream.seek(bit // 8)
        stream.write(changed)


def run(*arguments: Any) -> Any:
    """Run `tensorferry` in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])
