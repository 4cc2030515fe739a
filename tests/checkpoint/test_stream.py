"""Streams: any pieces, in order, become a file and its checksums."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.checkpoint.checksums import CHUNK_NBYTES
from tensorferry.checkpoint.pipeline import BUFFER_NBYTES, MAX_THREADS, Pipeline
from tensorferry.checkpoint.stream import Stream
from tests.support import mounts
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes

sizes = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([CHUNK_NBYTES, BUFFER_NBYTES]).flatmap(lambda n: st.integers(n - 3, n + 3)),
    st.integers(BUFFER_NBYTES, 3 * BUFFER_NBYTES),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pieces=st.lists(st.tuples(sizes, st.sampled_from("wcd")), max_size=8), reserve=sizes)
def test_any_pieces_become_the_file_and_its_checksums(
    directory: pathlib.Path, pieces: list[tuple[int, str]], reserve: int
) -> None:
    path = directory / "file"
    path.unlink(missing_ok=True)
    content = np.random.default_rng(len(pieces)).bytes(sum(nbytes for nbytes, _ in pieces))
    checksums, begin = [], 0
    with Pipeline() as pipeline:
        stream = Stream(str(path), pipeline, reserve_nbytes=reserve)
        for nbytes, kind in pieces:
            piece = content[begin : begin + nbytes]
            begin += nbytes
            if kind == "w":
                stream.write(piece)
            elif kind == "c":
                array = np.frombuffer(piece, np.uint8)
                memory = (array.ctypes.data, nbytes, array, None)
                checksums.append((stream.write_memory(memory, checksummed=True), piece))
            else:
                stream.write_deferred(nbytes, lambda piece=piece: piece)
            assert stream.nbytes == begin
        summary = stream.finish()
    assert path.read_bytes() == content
    assert summary.nbytes == len(content)
    assert summary.chunk_crcs == b"".join(
        zlib.crc32(content[begin : begin + CHUNK_NBYTES]).to_bytes(4, "little")
        for begin in range(0, len(content), CHUNK_NBYTES)
    )
    for checksum, piece in checksums:
        assert checksum.value() == zlib.crc32(piece)


def test_deferred_bytes_may_depend_on_checksums_before_them(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    expected = b""
    with Pipeline() as pipeline:
        stream = Stream(str(path), pipeline)
        for nbytes in (10, 9 * BUFFER_NBYTES + 5, BUFFER_NBYTES - 1, 1):
            payload = random_bytes(nbytes)
            checksum = stream.write_memory(
                (payload.ctypes.data, nbytes, payload, None), checksummed=True
            )
            stream.write_deferred(8, lambda checksum=checksum: b"%08x" % checksum.value())
            expected += payload.tobytes() + b"%08x" % zlib.crc32(payload)
        stream.finish()
    assert path.read_bytes() == expected


def test_sources_are_let_go_of_when_they_have_been_copied(directory: pathlib.Path) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    with Pipeline() as pipeline:
        stream = Stream(str(directory / "file"), pipeline)
        for _ in range(40):
            tensor = torch.ones(BUFFER_NBYTES // 4)
            alive.append(weakref.ref(tensor))
            stream.write(tensor)
            del tensor
            most = max(most, sum(reference() is not None for reference in alive))
        stream.wait_until_copied()
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        stream.finish()
    assert most <= 10  # those of eight buffers, and the one at hand


def test_few_sources_wait_to_be_copied(directory: pathlib.Path) -> None:
    written: list[int] = []
    may_copy = threading.Event()

    def write(stream: Stream) -> None:
        for _ in range(12):
            stream.write(torch.ones(BUFFER_NBYTES // 4))
            written.append(stream.nbytes)

    with Pipeline() as pipeline:
        for _ in range(MAX_THREADS):
            pipeline.submit(may_copy.wait)
        stream = Stream(str(directory / "file"), pipeline)
        writer = threading.Thread(target=write, args=(stream,))
        writer.start()
        count = 0
        while count < len(written) or not written:  # until it has to wait
            count = len(written)
            time.sleep(0.3)
        may_copy.set()
        writer.join()
        stream.finish()
    assert count <= 3, f"{count} of 12 sources were kept at once"


def test_what_is_given_may_change_once_it_is_copied(directory: pathlib.Path) -> None:
    path = directory / "file"
    data = bytearray(b"a" * (BUFFER_NBYTES + 100))
    with Pipeline() as pipeline:
        stream = Stream(str(path), pipeline)
        stream.write(data)
        stream.wait_until_copied()
        data[:] = b"b" * len(data)
        stream.write(data[:50])
        stream.finish()
    assert path.read_bytes() == b"a" * (BUFFER_NBYTES + 100) + b"b" * 50


def test_streams_follow_each_other_through_one_pipeline(directory: pathlib.Path) -> None:
    with Pipeline() as pipeline:
        endings = []
        for number in range(30):
            stream = Stream(str(directory / str(number)), pipeline)
            stream.write(b"%d" % number * 1000)
            endings.append(stream.finish_later())
        assert [ending.result().nbytes for ending in endings] == [1000] * 10 + [2000] * 20
    for number in range(30):
        assert (directory / str(number)).read_bytes() == b"%d" % number * 1000


def test_existing_file_is_left_as_it_is(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(b"old")
    with Pipeline() as pipeline, pytest.raises(tensorferry.StorageError) as caught:
        Stream(str(path), pipeline)
    assert caught.value.errno == errno.EEXIST
    assert path.read_bytes() == b"old"


def test_full_disk_is_found_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    with mounts.tmpfs(tmp_path / "small", 8 << 20) as small, Pipeline() as pipeline:
        with pytest.raises(tensorferry.StorageError) as caught:
            Stream(str(small / "file"), pipeline, reserve_nbytes=16 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert not list(small.iterdir())
        assert mounts.free_nbytes(small) == 8 << 20


def test_failing_function_fails_the_stream(directory: pathlib.Path) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    with Pipeline() as pipeline:
        stream = Stream(str(directory / "file"), pipeline)
        stream.write_deferred(10, fail)
        stream.write(bytes(20 * BUFFER_NBYTES)[:BUFFER_NBYTES])
        with pytest.raises(ZeroDivisionError):
            stream.finish()
        stream.abort()
    assert not (directory / "file").exists()


def test_function_that_returns_too_little_fails_the_stream(directory: pathlib.Path) -> None:
    with Pipeline() as pipeline:
        stream = Stream(str(directory / "file"), pipeline)
        stream.write_deferred(10, lambda: b"short")
        with pytest.raises(ValueError, match="5 bytes instead of 10"):
            stream.finish()
        stream.abort()


def test_aborted_streams_leave_nothing(directory: pathlib.Path) -> None:
    def save_half() -> None:
        with Pipeline() as pipeline:
            stream = Stream(str(directory / "file"), pipeline, reserve_nbytes=64 << 20)
            stream.write(bytes(5 * BUFFER_NBYTES + 7))
            stream.abort()
            # The pipeline goes on serving others.
            for _ in range(10):
                other = Stream(str(directory / "other"), pipeline)
                other.write(bytes(BUFFER_NBYTES))
                other.finish()
                (directory / "other").unlink()

    save_half()
    with nothing_leaks():
        for _ in range(10):
            save_half()
    assert not list(directory.iterdir())
