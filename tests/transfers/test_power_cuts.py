"""Writes with `sync=True` survive a power cut after they return: a mounted image of the device has them."""

from __future__ import annotations

import itertools
import subprocess
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import Bytes, RandomBytes
    from tests.support.power_cuts import Cut

NBYTES = 3_000_001


def write_new(path: pathlib.Path, data: Bytes) -> None:
    tensorferry.write(path, data, sync=True)


def write_old(path: pathlib.Path, data: Bytes) -> None:
    path.write_bytes(b"x" * (data.size + 5))
    tensorferry.write(path, data, truncate=True, sync=True)


def write_later(path: pathlib.Path, data: Bytes) -> None:
    """The write that made the name was not durable, but the name is durable after a later durable write."""
    tensorferry.write(path, data[:10])
    tensorferry.write(path, data, sync=True)


def write_whole(path: pathlib.Path, data: Bytes) -> None:
    path.write_bytes(b"x" * (data.size + 5))
    tensorferry.write(path, data, sync=True)


def write_atomically(path: pathlib.Path, data: Bytes) -> None:
    path.write_bytes(b"x" * (data.size + 5))
    tensorferry.write(path, data, atomic=True, sync=True)


def write_by_link(path: pathlib.Path, data: Bytes) -> None:
    link = path.parent.parent / f"link to {path.name}"
    link.symlink_to(path)
    tensorferry.write(link, data, sync=True)


def write_pieces(path: pathlib.Path, data: Bytes) -> None:
    """Pieces of the file, out of order, among other files in other directories."""
    other = path.parent.parent / "other"
    other.mkdir(exist_ok=True)
    cuts = [0, 1, 100_003, 1 << 20, data.size]
    pieces = [(path, data[b:e], b) for b, e in itertools.pairwise(cuts)]
    tensorferry.write_many([*pieces[::-1], (other / "file", data[:5_003])], sync=True)


def write_by_file(path: pathlib.Path, data: Bytes) -> None:
    with tensorferry.open(path, "w") as file:
        file.write(data[:5_003], sync=True)
        file.write_from(data[5_003:], 5_003, sync=True).result()


WAYS = [
    write_new,
    write_old,
    write_later,
    write_whole,
    write_atomically,
    write_by_link,
    write_pieces,
    write_by_file,
]


def test_what_was_written_with_sync_is_there_with_its_name_after_a_power_cut(
    cut: Cut, random_bytes: RandomBytes
) -> None:
    folder = cut.path / "folder"
    folder.mkdir()
    subprocess.run(["sync", "-f", str(folder)], check=True)
    for way in WAYS:
        data = random_bytes(NBYTES)
        way(folder / way.__name__, data)
        with cut.now() as after:
            assert_equal(contents(after / "folder" / way.__name__), data)


@pytest.mark.alone  # concurrent tests may call sync(2), which syncs all files
def test_a_power_cut_loses_what_nobody_synced(cut: Cut, random_bytes: RandomBytes) -> None:
    """Otherwise the test above could not fail."""

    def is_lost(name: str) -> bool:
        tensorferry.write(cut.path / name, random_bytes(NBYTES))
        with cut.now() as after:
            return not (after / name).exists()

    assert any(is_lost(f"file{k}") for k in range(5)), "another process syncs everything"
