"""Many whole files in one call, and one file under several names or concurrently with another call."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support import commands

if TYPE_CHECKING:
    import pathlib

FEW_SECONDS = """
import sys, threading, time
import numpy as np
import tensorferry

end = time.monotonic() + 4
array = np.full(1000, 65, np.uint8)

def write(number):
    items = [(f"{sys.argv[1]}/{number}-{at}", array) for at in range(2)]
    while time.monotonic() < end:
        tensorferry.write_many(items)

threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_a_request_lives_until_the_last_of_its_helpers_has_ended(
    tmpfs_directory: pathlib.Path,
) -> None:
    """Each cut file asks for one; the last file may be done before the next helper is asked for."""
    done = commands.run(sys.executable, "-c", FEW_SECONDS, tmpfs_directory)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["./one", "link", "hard", "../{folder}/one"])
def test_a_file_is_written_as_a_whole_once_whatever_its_names(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(directory)
    one = directory / "one"
    one.write_bytes(b"before")
    (directory / "link").symlink_to(one)
    os.link(one, "hard")
    other = name.format(folder=directory.name)
    items = [("one", np.zeros(2000, np.uint8)), (other, np.ones(1000, np.uint8))]
    with pytest.raises(ValueError, match=r"items\[1\]: .* is already replaced by items\[0\]"):
        tensorferry.write_many(items)
    assert one.read_bytes() == b"before"


@pytest.mark.parametrize("name", ["./new", "link"])
def test_the_same_where_it_is_not_there_yet(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(directory)
    (directory / "link").symlink_to(directory.resolve() / "new")
    with pytest.raises(ValueError, match="is already replaced by"):
        tensorferry.write_many([("new", np.zeros(2, np.uint8)), (name, np.ones(1, np.uint8))])
    assert not (directory / "new").exists()


def test_pieces_of_a_whole_file_are_one_write_however_many(tmpfs_directory: pathlib.Path) -> None:
    """Another write of the file is before all of them or behind."""
    path = tmpfs_directory / "file"
    count, nbytes = 600, 512
    pieces: list[tuple[object, ...]] = [(path, np.ones(nbytes, np.uint8))]
    pieces += [(path, np.ones(nbytes, np.uint8), at * nbytes) for at in range(1, count)]
    small = np.full(100_000, 2, np.uint8)
    for _ in range(60):
        threads = [
            threading.Thread(target=tensorferry.write_many, args=(pieces,)),
            threading.Thread(target=tensorferry.write, args=(path, small)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = path.read_bytes()
        assert found in (b"\1" * (count * nbytes), small.tobytes())
