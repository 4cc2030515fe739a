"""Streams accept GPU memory as well as host memory, in any mixture, after earlier work on its stream."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.transfer.streams import Field
from tests.gpu.arrays import Amid
from tests.support.data import crcs
from tests.support.effort import examples
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

BUFFER_NBYTES = 4 << 20

sizes = st.one_of(
    st.sampled_from([0, 1, 4096, BUFFER_NBYTES - 1, BUFFER_NBYTES, BUFFER_NBYTES + 1]),
    st.integers(0, 100_000),
    st.integers(0, 3 * BUFFER_NBYTES),
)


@settings(max_examples=examples(15))
@given(
    pieces=st.lists(
        st.tuples(sizes, st.integers(0, 600), st.sampled_from(["host", "gpu", "last gpu", "sum"])),
        max_size=8,
    ),
    offset=sizes,
    waits=st.booleans(),
)
def test_host_and_gpu_memory_follow_each_other(
    gpu: Gpu,
    engine: str,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    pieces: list[tuple[int, int, str]],
    offset: int,
    waits: bool,
) -> None:
    path = directory / "file"
    path.unlink(missing_ok=True)
    expected: list[bytes] = []
    kept: list[Any] = []
    sums = tensorferry.Checksums(5000, segments=True)
    with (
        tensorferry.open(path, "w", engine=engine) as file,
        file.stream(offset, checksums=sums) as stream,
    ):
        for nbytes, place, where in pieces:
            if where == "sum":
                fields = [Field("segment", 0, segment=len(expected) - 1)] if expected else []
                stream.append_with_fields(b"....", fields)
                crc = zlib.crc32(expected[-1]) if expected else None
                expected.append(b"...." if crc is None else crc.to_bytes(4, "little"))
                continue
            data = random_bytes(nbytes).tobytes()
            expected.append(data)
            if where == "host":
                stream.append(data)
                continue
            array = Amid(gpu, data, place, gpu.count - 1 if where == "last gpu" else 0)
            kept.append(array)
            stream.append(array.array)
            if waits:
                stream.wait_until_copied()
    data = b"".join(expected)
    assert_equal(contents(path)[offset:], data)
    assert sums.chunks == crcs(data, 5000)
    assert sums.segments == [zlib.crc32(each) for each in expected]
    for array in kept:
        array.contents()  # looks at its neighbours


def test_what_is_queued_before_is_waited_for(
    gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    nbytes = 3 * BUFFER_NBYTES + 5
    arrays = [gpu.array(nbytes) for _ in range(2)]
    with (
        tensorferry.open(directory / "file", "w", engine=engine) as file,
        gpu.new_stream(),
        file.stream() as stream,
    ):
        for value, array in enumerate(arrays, 1):
            gpu.fill_later(array, value, 0.1)
            stream.append(array)
            stream.append(b"between")
    found = contents(directory / "file")
    assert (found[:nbytes] == 1).all()
    assert (found[nbytes + 7 : 2 * nbytes + 7] == 2).all()


@pytest.mark.in_turn
def test_streams_of_gpu_memory_that_are_dropped_leave_it_alone(
    gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    for _ in range(5):
        array = gpu.array(5 * BUFFER_NBYTES)
        file = tensorferry.open(directory / "file", "w", engine=engine)
        stream = file.stream()
        gpu.fill_later(array, 7, 0.05)
        stream.append(array)
        stream.abort()
        file.close()
        assert set(gpu.bytes_of(array)) == {7}
        with pytest.raises(ValueError, match="has ended"):
            stream.append(array)


def test_many_small_arrays_of_a_gpu(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(300_000)
    arrays = [gpu.array(data[begin : begin + 1000]) for begin in range(0, data.size, 1000)]
    with tensorferry.open(directory / "file", "w", engine=engine) as file, file.stream() as stream:
        stream.append(arrays)
    assert_equal(contents(directory / "file"), data)
