"""New files: all written bytes, in order, form the file and its checksums."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.transfer.new_file import NewFile
from tensorferry.transfer.streams import Stream
from tests.support import mounts
from tests.support.data import crcs
from tests.support.effort import examples
from tests.support.expect import interrupted_in
from tests.support.faultfs import Fault
from tests.support.forks import passes_in_child
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.faultfs import FaultFS

BUFFER_NBYTES = 4 << 20
CHUNK_NBYTES = 256 << 10

sizes = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([CHUNK_NBYTES, BUFFER_NBYTES]).flatmap(lambda n: st.integers(n - 3, n + 3)),
    st.integers(BUFFER_NBYTES, 3 * BUFFER_NBYTES),
)


@settings(max_examples=examples(40))
@given(pieces=st.lists(st.tuples(sizes, st.sampled_from("wbc")), max_size=8), reserve=sizes)
def test_any_pieces_become_the_file_and_its_checksums(
    directory: pathlib.Path, pieces: list[tuple[int, str]], reserve: int
) -> None:
    path = directory / "file"
    path.unlink(missing_ok=True)
    content = np.random.default_rng(len(pieces)).bytes(sum(nbytes for nbytes, _ in pieces))
    begin = 0
    sums = tensorferry.Checksums(CHUNK_NBYTES, segments=True)
    file = NewFile(str(path), reserve_nbytes=reserve, checksums=sums)
    for nbytes, kind in pieces:
        piece = content[begin : begin + nbytes]
        begin += nbytes
        if kind == "w":
            file.write(piece)
        elif kind == "b":
            file.write_bytes(piece)
        else:
            changing = bytearray(piece)
            assert file.write_copied(changing) == nbytes
            changing[:] = bytes(nbytes)
        assert file.nbytes == begin
    summary = file.finish()
    assert path.read_bytes() == content
    assert summary.nbytes == len(content)
    assert summary.chunk_crcs == b"".join(
        crc.to_bytes(4, "little") for crc in crcs(content, CHUNK_NBYTES)
    )


def test_many_are_finished_while_others_are_written(directory: pathlib.Path) -> None:
    files = []
    for number in range(30):
        file = NewFile(str(directory / str(number)), reserve_nbytes=1000)
        file.write(b"%d" % number * 1000)
        file.begin_finish()
        files.append(file)
    assert [file.wait().nbytes for file in files] == [1000] * 10 + [2000] * 20
    for number in range(30):
        assert (directory / str(number)).read_bytes() == b"%d" % number * 1000


def test_existing_file_is_left_as_it_is(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(b"old")
    with pytest.raises(tensorferry.StorageError) as caught:
        NewFile(str(path))
    assert caught.value.errno == errno.EEXIST
    assert path.read_bytes() == b"old"


def test_full_disk_is_found_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    with mounts.tmpfs(tmp_path / "small", 8 << 20) as small:
        with pytest.raises(tensorferry.StorageError) as caught:
            NewFile(str(small / "file"), reserve_nbytes=16 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert not list(small.iterdir())
        assert mounts.free_nbytes(small) == 8 << 20


def test_aborted_ones_leave_nothing(directory: pathlib.Path) -> None:
    def save_half() -> None:
        file = NewFile(str(directory / "file"), reserve_nbytes=64 << 20)
        file.write(bytes(5 * BUFFER_NBYTES + 7))
        file.abort()

    save_half()
    # The process keeps as many buffers as it has used at a time.
    with nothing_leaks(resident_slack_nbytes=44 << 20):
        for _ in range(10):
            save_half()
    assert not list(directory.iterdir())


def test_an_abort_removes_only_the_file_that_was_created(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (directory / name).mkdir()
    (directory / "there" / "file").write_text("precious")
    monkeypatch.chdir(directory / "here")
    file = NewFile("file")
    monkeypatch.chdir(directory / "there")
    file.abort()
    assert not (directory / "here" / "file").exists()
    assert (directory / "there" / "file").read_text() == "precious"
    file = NewFile(str(directory / "here" / "file"))
    (directory / "there" / "file").rename(directory / "here" / "file")
    file.abort()
    assert (directory / "here" / "file").read_text() == "precious"


def test_one_whose_abort_is_interrupted_leaves_nothing(faultfs: FaultFS) -> None:
    file = NewFile(str(faultfs.path / "file"))
    faultfs.order(Fault("write", hold=True))
    file.write(bytes(4 * BUFFER_NBYTES))
    with interrupted_in(Stream.abort, faultfs):
        file.abort()
    assert not list(faultfs.backing.iterdir())


def test_a_forked_child_leaves_its_parents_file_alone(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    content = random_bytes(3 * BUFFER_NBYTES + 5)
    file = NewFile(str(directory / "file"))
    file.write(content[: BUFFER_NBYTES + 7])

    def in_the_child() -> None:
        with pytest.raises(RuntimeError, match="before fork"):
            file.write(b"more")
        with pytest.raises(RuntimeError, match="before fork"):
            file.finish()
        file.abort()

    passes_in_child(in_the_child)
    file.write(content[BUFFER_NBYTES + 7 :])
    file.finish()
    assert (directory / "file").read_bytes() == content.tobytes()
