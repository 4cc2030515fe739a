"""Functions and files with GPU memory: any size, offset and address, on every engine, compared with plain Python."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tests.gpu.arrays import Amid
from tests.support import page_cache
from tests.support.data import crcs
from tests.support.effort import examples
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

BLOCK = 65536

# Sizes and offsets at the boundaries of sectors, pages and blocks, and next to them.
edges = st.sampled_from(
    [0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 8192, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]
)
sizes = st.one_of(edges, st.integers(0, 5 * BLOCK))
places = st.one_of(st.sampled_from([0, 4, 256, 512, 4096]), st.integers(0, 5000))
block_sizes = st.sampled_from([4096, BLOCK, 1 << 20])
queue_depths = st.sampled_from([1, 2, 32])
directs = st.sampled_from(["auto", True, False])
in_turn = settings(max_examples=examples(30))


def random_data(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@in_turn
@given(
    steps=st.lists(st.tuples(sizes, sizes, places, st.booleans()), min_size=1, max_size=5),
    direct=directs,
    block_size=block_sizes,
    queue_depth=queue_depths,
)
def test_any_sequence_of_writes_and_reads_equals_plain_files(
    gpu: Gpu,
    engine: str,
    directory: pathlib.Path,
    steps: list[tuple[int, int, int, bool]],
    direct: bool | str,
    block_size: int,
    queue_depth: int,
) -> None:
    path = directory / "steps"
    path.unlink(missing_ok=True)
    model = bytearray()
    with tensorferry.open(
        path, "w+", engine=engine, block_size=block_size, queue_depth=queue_depth, direct=direct
    ) as file:
        for seed, (nbytes, offset, place, waits) in enumerate(steps):
            data = random_data(seed, nbytes)
            source = Amid(gpu, data, place)
            if waits:
                file.write_from(source.array, offset).result()
            else:
                file.write(source.array, offset)
            if nbytes:
                model.extend(bytes(max(0, offset + nbytes - len(model))))
                model[offset : offset + nbytes] = data
            assert_equal(source.contents(), data)
            begin = min(offset // 2, len(model))
            found = Amid(gpu, min(nbytes + 9, len(model) - begin), place // 2)
            file.read(found.array, begin)
            wanted = model[begin : begin + min(nbytes + 9, len(model) - begin)]
            assert_equal(found.contents(), wanted)
    assert_equal(path.read_bytes(), model)


@in_turn
@given(
    nbytes=sizes,
    offset=sizes,
    place=places,
    direct=directs,
    block_size=block_sizes,
    cached=st.sampled_from(["nothing", "everything", "the first half", "the second half"]),
)
def test_any_part_of_a_file_is_read_wherever_its_bytes_are(
    gpu: Gpu,
    engine: str,
    directory: pathlib.Path,
    nbytes: int,
    offset: int,
    place: int,
    direct: bool | str,
    block_size: int,
    cached: str,
) -> None:
    path = directory / "file"
    data = random_data(nbytes, offset + nbytes + 11)
    path.write_bytes(data)
    half = path.stat().st_size // 2
    if cached != "everything":
        dropped = {
            "nothing": (0, 0),
            "the first half": (half, 0),
            "the second half": (0, max(1, half)),
        }
        page_cache.make_cold(path, *dropped[cached])
    with tensorferry.open(path, engine=engine, block_size=block_size, direct=direct) as file:
        found = [Amid(gpu, nbytes, place), Amid(gpu, nbytes, place + 1)]
        file.read(found[0].array, offset)
        file.read_into(found[1].array, offset).result()
    for array in found:
        assert_equal(array.contents(), data[offset : offset + nbytes])
    assert_equal(path.read_bytes(), data)


@in_turn
@given(
    nbytes=sizes,
    offset=sizes,
    place=places,
    direct=directs,
    block_size=block_sizes,
    queue_depth=queue_depths,
)
def test_a_write_of_any_part_keeps_the_files_other_bytes(
    gpu: Gpu,
    engine: str,
    directory: pathlib.Path,
    nbytes: int,
    offset: int,
    place: int,
    direct: bool | str,
    block_size: int,
    queue_depth: int,
) -> None:
    path = directory / "file"
    before = random_data(1, 6 * BLOCK)
    path.write_bytes(before)
    data = random_data(2, nbytes)
    source = Amid(gpu, data, place)
    with tensorferry.open(
        path, "r+", engine=engine, block_size=block_size, queue_depth=queue_depth, direct=direct
    ) as file:
        file.write(source.array, offset)
    wanted = bytearray(before)
    if nbytes:
        wanted.extend(bytes(max(0, offset + nbytes - len(before))))
        wanted[offset : offset + nbytes] = data
    assert_equal(path.read_bytes(), wanted)


@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20, 33_554_432, 50_000_017])
def test_functions_write_and_read(
    gpu: Gpu, directory: pathlib.Path, random_bytes: RandomBytes, nbytes: int
) -> None:
    data = random_bytes(nbytes)
    source, found = Amid(gpu, data, 3), Amid(gpu, nbytes, 1001)
    tensorferry.write(directory / "file", source.array)
    assert tensorferry.read(directory / "file", found.array) is found.array
    assert_equal(contents(directory / "file"), data)
    assert_equal(found.contents(), data)


def test_truncating_and_syncing_writes(
    gpu: Gpu, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * 3_000_000)
    data = random_bytes(2_000_003)
    array = gpu.array(data)
    tensorferry.write(path, array, 0, sync=True)
    assert path.stat().st_size == 3_000_000
    tensorferry.write(path, array, 50, truncate=True, sync=True)
    assert path.stat().st_size == 50 + data.size
    assert_equal(contents(path)[50:], data)
    tensorferry.write(path, array, sync=True)
    assert_equal(contents(path), data)


def test_memory_file_systems_work(
    gpu: Gpu, engine: str, tmpfs_directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(5_000_003)
    found = Amid(gpu, data.size, 5)
    with tensorferry.open(tmpfs_directory / "file", "w+", engine=engine) as file:
        file.write(gpu.array(data), 5)
        file.read(found.array, 5)
    assert_equal(found.contents(), data)
    assert_equal(contents(tmpfs_directory / "file")[5:], data)


def test_many_of_host_and_gpu_memory_in_one_call(
    gpu: Gpu, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = [random_bytes(37 * index % 9001 + 70_000 * (index % 7 == 0)) for index in range(300)]
    on_gpu = [index % 3 > 0 for index in range(len(data))]
    device = [index % gpu.count for index in range(len(data))]

    def place(bytes_: Any, index: int) -> Any:
        return gpu.array(bytes_, device[index]) if on_gpu[index] else bytes_

    paths = [directory / str(index) for index in range(len(data))]
    sources = [place(array, index) for index, array in enumerate(data)]
    tensorferry.write_many(list(zip(paths, sources, strict=True)))
    for path, array in zip(paths, data, strict=True):
        assert_equal(contents(path), array)
    found = [place(np.zeros(array.size, np.uint8), index) for index, array in enumerate(data)]
    tensorferry.read_many(list(zip(paths, found, strict=True)))
    for index, array in enumerate(data):
        got = gpu.bytes_of(found[index]) if on_gpu[index] else found[index]
        assert_equal(got, array)


def test_many_pieces_of_one_file(
    gpu: Gpu, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(3_000_001)
    cuts = [0, 1, 4097, 70_000, 1_000_001, 2_097_152, data.size]
    whole = gpu.array(data)
    pieces = list(itertools.pairwise(cuts))
    path = directory / "file"
    tensorferry.write_many([(path, gpu.part(whole, b, e), b) for b, e in pieces])
    assert_equal(contents(path), data)
    found = gpu.array(data.size)
    tensorferry.read_many([(path, gpu.part(found, b, e), b) for b, e in reversed(pieces)])
    assert_equal(gpu.bytes_of(found), data)


def test_many_reports_the_first_that_failed(gpu: Gpu, directory: pathlib.Path) -> None:
    (directory / "good").write_bytes(b"12345")
    with pytest.raises(tensorferry.StorageError) as caught:
        tensorferry.read_many(
            [
                (directory / "good", gpu.array(5)),
                (directory / "none", gpu.array(1)),
                (directory / "nil", bytearray(1)),
            ]
        )
    assert caught.value.filename == str(directory / "none")


def test_futures_of_a_file(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = [random_bytes(200_003) for _ in range(20)]
    called: list[object] = []
    with tensorferry.open(directory / "file", "w+", engine=engine, block_size=BLOCK) as file:
        writes = [
            file.write_from(gpu.array(array), index * array.size)
            for index, array in enumerate(data)
        ]
        for future in writes:
            future.add_done_callback(called.append)
            assert future.result(timeout=60) is not None
        found = [gpu.array(array.size) for array in data]
        reads = [file.read_into(array, index * data[0].size) for index, array in enumerate(found)]
        for future, array in zip(reads, found, strict=True):
            assert future.result(timeout=60) is array
            assert future.done()
            assert future.exception() is None
    assert_equal(contents(directory / "file"), np.concatenate(data))
    for array, wanted in zip(found, data, strict=True):
        assert_equal(gpu.bytes_of(array), wanted)
    assert len(called) == len(writes)


@in_turn
@given(
    pieces=st.lists(
        st.tuples(sizes, places, st.sampled_from(["host", "gpu", "last gpu", "gap"])), max_size=7
    ),
    offset=sizes,
    direct=directs,
    block_size=block_sizes,
    checked=st.booleans(),
)
def test_segments_of_host_and_gpu_memory_are_one_transfer(
    gpu: Gpu,
    engine: str,
    directory: pathlib.Path,
    pieces: list[tuple[int, int, str]],
    offset: int,
    direct: bool | str,
    block_size: int,
    checked: bool,
) -> None:
    path = directory / "segments"
    path.unlink(missing_ok=True)
    parts = [random_data(seed, nbytes) for seed, (nbytes, _, _) in enumerate(pieces)]

    def amid(data: Any, place: int, where: str) -> Amid:
        return Amid(gpu, data, place, gpu.count - 1 if where == "last gpu" else 0)

    def given_to_us(array: Any) -> Any:
        return array.array if isinstance(array, Amid) else array

    sources = [
        amid(data, place, where) if "gpu" in where else data
        for data, (_, place, where) in zip(parts, pieces, strict=True)
    ]
    targets = [
        amid(nbytes, place, where)
        if "gpu" in where
        else nbytes
        if where == "gap"
        else bytearray(nbytes)
        for nbytes, place, where in pieces
    ]
    data = b"".join(parts)
    chunks = crcs(data, 5000)
    sums = tensorferry.Checksums(5000, segments=True) if checked else None
    check = tensorferry.Checksums(5000, expected=chunks) if checked else None
    with tensorferry.open(path, "w+", engine=engine, block_size=block_size, direct=direct) as file:
        file.write_from(map(given_to_us, sources), offset, checksums=sums).result()
        assert_equal(path.read_bytes()[offset:], data)
        if sums is not None:
            assert sums.chunks == chunks
            assert sums.segments == [zlib.crc32(part) for part in parts]
        # Integers alone would be refused.
        file.read([*map(given_to_us, targets), bytearray()], offset, checksums=check)
    for target, part in zip(targets, parts, strict=True):
        if isinstance(target, Amid):
            assert_equal(target.contents(), part)
        elif isinstance(target, bytearray):
            assert_equal(target, part)


def test_nothing_of_a_damaged_chunk_reaches_a_gpu(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(300_000)
    expected = crcs(data.tobytes(), BLOCK)
    data[2 * BLOCK + 1] ^= 1
    data.tofile(directory / "file")
    target = gpu.array(data.size)
    with (
        tensorferry.open(directory / "file", engine=engine) as file,
        pytest.raises(tensorferry.ChecksumError) as raised,
    ):
        file.read(target, checksums=tensorferry.Checksums(BLOCK, expected=expected))
    assert raised.value.offset == 2 * BLOCK
    assert not any(gpu.bytes_of(gpu.part(target, 2 * BLOCK, 3 * BLOCK)))


def test_futures_are_awaited(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(1_000_003)
    found = gpu.array(data.size)

    async def copy() -> None:
        with tensorferry.open(directory / "file", "w+", engine=engine) as file:
            await file.write_from(gpu.array(data))
            assert await file.read_into(found) is found

    asyncio.run(copy())
    assert_equal(gpu.bytes_of(found), data)


def test_closing_a_file_waits_for_its_transfers(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(20_000_000)
    with tensorferry.open(directory / "file", "w", engine=engine) as file:
        future = file.write_from(gpu.array(data), 1)
    assert future.done()
    assert_equal(contents(directory / "file")[1:], data)


def test_statistics_count_what_went_to_and_from_gpus(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    with tensorferry.open(directory / "file", "w+", engine=engine) as file:
        file.write(random_bytes(10_000_000))
        assert file.stats()["gpu_nbytes"] == 0
        file.write(gpu.array(random_bytes(10_000_000)))
        assert file.stats()["gpu_nbytes"] == 10_000_000
        file.read(gpu.array(123), 5)
        assert file.stats()["gpu_nbytes"] == 10_000_123
        assert file.stats()["gds_nbytes"] == 0
        assert file.stats()["written_nbytes"] == 20_000_000


def test_one_transfer_of_more_than_4_gib(gpu: Gpu, directory: pathlib.Path) -> None:
    """The file is a hole, which uses no space. GPUs of the stand-in are host memory, so they use a 64th of the size."""
    nbytes = ((4 << 30) // (64 if gpu.name == "stand-in" else 1)) + 4097
    path = directory / "hole"
    with open(path, "wb") as plain:
        plain.truncate(nbytes + 5)
        plain.seek(nbytes)
        plain.write(b"\1")
    found = gpu.array(nbytes)
    gpu.fill_later(found, 7, 0)
    tensorferry.read(path, found, 1)
    assert gpu.bytes_of(gpu.part(found, nbytes - 1, nbytes)) == b"\1"
    for begin in range(0, nbytes - 1, 1 << 28):
        end = min(nbytes - 1, begin + (1 << 28))
        assert not np.frombuffer(gpu.bytes_of(gpu.part(found, begin, end)), np.uint8).any()
