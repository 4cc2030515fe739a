"""Several arrays as one transfer, and the checksums of the moved bytes, on every engine, compared with plain Python."""

from __future__ import annotations

import errno
import gc
import itertools
import pickle
import weakref
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tests.support import page_cache
from tests.support.data import aligned, crcs
from tests.support.effort import examples
from tests.support.faultfs import Fault
from tests.support.optional import torch

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import Bytes, RandomBytes
    from tests.support.faultfs import FaultFS

BLOCK = 65536
OUTSIDE = b"\xa5" * 5000

edges = st.sampled_from([0, 1, 7, 511, 512, 4095, 4096, 4097, BLOCK, 2 * BLOCK, 3 * BLOCK + 1])
sizes = st.one_of(edges, st.integers(0, 3 * BLOCK))
segments = st.lists(st.tuples(sizes, st.sampled_from([0, 1, 4, 64, 512])), max_size=8)
chunk_sizes = st.sampled_from([4096, 5000, BLOCK, 1 << 20])
directs = st.sampled_from(["auto", True, False])
in_turn = settings(max_examples=examples(40))


def arrays_of(pieces: list[tuple[int, int]], seed: int) -> list[Bytes]:
    generator = np.random.default_rng(seed)
    arrays = [aligned(nbytes, misalignment) for nbytes, misalignment in pieces]
    for array in arrays:
        array[:] = generator.integers(0, 256, array.nbytes, np.uint8)
    return arrays


def joined(arrays: list[Bytes]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@in_turn
@given(
    pieces=segments,
    offset=sizes,
    chunk_nbytes=chunk_sizes,
    direct=directs,
    waits=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_segments_are_written_one_after_the_other(
    engine: str,
    directory: pathlib.Path,
    pieces: list[tuple[int, int]],
    offset: int,
    chunk_nbytes: int,
    direct: bool | str,
    waits: bool,
    seed: int,
) -> None:
    path = directory / "file"
    sources = arrays_of(pieces, seed)
    data = joined(sources)
    before = np.random.default_rng(seed + 1).bytes(offset + len(data) + len(OUTSIDE))
    path.write_bytes(before)
    sums = tensorferry.Checksums(chunk_nbytes, segments=True)
    with tensorferry.open(path, "r+", engine=engine, block_size=BLOCK, direct=direct) as file:
        if waits:
            assert file.write_from(sources, offset, checksums=sums).result() is sources
        else:
            file.write(sources, offset, checksums=sums)
    assert path.read_bytes() == before[:offset] + data + before[offset + len(data) :]
    assert sums.chunks == crcs(data, chunk_nbytes)
    assert sums.segments == [zlib.crc32(array) for array in sources]


@in_turn
@given(
    pieces=segments,
    gaps=st.lists(st.booleans(), min_size=8, max_size=8),
    offset=sizes,
    chunk_nbytes=chunk_sizes,
    direct=directs,
    cached=st.booleans(),
    checked=st.sampled_from(["not", "taken", "compared", "in_place"]),
    seed=st.integers(0, 1 << 30),
)
def test_any_segments_are_filled_and_gaps_passed_over(
    engine: str,
    directory: pathlib.Path,
    pieces: list[tuple[int, int]],
    gaps: list[bool],
    offset: int,
    chunk_nbytes: int,
    direct: bool | str,
    cached: bool,
    checked: str,
    seed: int,
) -> None:
    path = directory / "file"
    wanted = arrays_of(pieces, seed)
    data = joined(wanted)
    path.write_bytes(OUTSIDE[:1] * offset + data + OUTSIDE)
    if not cached:
        page_cache.make_cold(path)
    targets: list[Any] = [
        array.nbytes if gap else aligned(array.nbytes, misalignment)
        for array, gap, (_, misalignment) in zip(wanted, gaps, pieces, strict=False)
    ]
    targets.append(aligned(0))  # integers alone would be refused
    wanted.append(aligned(0))
    expected = crcs(data, chunk_nbytes) if checked in ("compared", "in_place") else None
    sums = None
    if checked != "not":
        in_place = checked == "in_place"
        sums = tensorferry.Checksums(
            chunk_nbytes, segments=True, expected=expected, in_place=in_place
        )
    with tensorferry.open(path, engine=engine, block_size=BLOCK, direct=direct) as opened:
        found = opened.read_into(iter(targets), offset, checksums=sums).result()
    assert list(found) == targets
    for array, target in zip(wanted, targets, strict=True):
        if not isinstance(target, int):
            assert target.tobytes() == array.tobytes()
    if sums is not None:
        assert sums.chunks == crcs(data, chunk_nbytes)
        assert sums.segments == [zlib.crc32(array) for array in wanted]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_nothing_of_a_damaged_chunk_reaches_an_array(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes, direct: bool, blocking: bool
) -> None:
    path = directory / "file"
    data = random_bytes(1_000_000)
    damaged = data.copy()
    damaged[3 * BLOCK + 5] ^= 16
    damaged.tofile(path)
    targets = [np.full(nbytes, 7, np.uint8) for nbytes in (3 * BLOCK - 1, 2, BLOCK, 500_000)]
    nbytes = sum(target.nbytes for target in targets)
    expected = crcs(data[:nbytes].tobytes(), BLOCK)
    sums = tensorferry.Checksums(BLOCK, expected=expected)
    with tensorferry.open(path, engine=engine, direct=direct) as file:

        def read() -> Any:
            if blocking:
                return file.read(targets, checksums=sums)
            return file.read_into(targets, checksums=sums).result()

        with pytest.raises(tensorferry.ChecksumError, match="bytes 196608 to 262144") as raised:
            read()
    error = raised.value
    assert (error.filename, error.offset, error.nbytes, error.errno) == (
        *(str(path), 3 * BLOCK, BLOCK),
        None,
    )
    assert error.transferred < error.expected == nbytes
    again = pickle.loads(pickle.dumps(error))
    assert (again.offset, again.nbytes, str(again)) == (error.offset, error.nbytes, str(error))
    assert (np.concatenate(targets)[3 * BLOCK : 4 * BLOCK] == 7).all()


@pytest.mark.parametrize("direct", ["auto", True, False])
@pytest.mark.parametrize("chunk_nbytes", [5000, BLOCK, 1 << 20])
def test_damage_is_told_of_what_went_straight_to_the_array(
    engine: str,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    direct: bool | str,
    chunk_nbytes: int,
) -> None:
    data = random_bytes(3_000_000)
    expected = crcs(data.tobytes(), chunk_nbytes)
    at = 1_234_567
    target = aligned(data.nbytes)
    with tensorferry.open(
        directory / "file", "w+", engine=engine, block_size=4 * BLOCK, direct=direct
    ) as file:
        file.write(data)
        for blocking in (True, False):
            sums = tensorferry.Checksums(chunk_nbytes, expected=expected, in_place=True)
            target[:] = 0
            if blocking:
                file.read(target, checksums=sums)
            else:
                file.read_into(target, checksums=sums).result()
            assert (target == data).all()
            assert sums.chunks == expected
        file.write(data[at : at + 1] ^ 1, at)
        sums = tensorferry.Checksums(chunk_nbytes, expected=expected, in_place=True)
        with pytest.raises(tensorferry.ChecksumError) as raised:
            file.read(target, checksums=sums)
        with pytest.raises(ValueError, match="not complete"):
            assert sums.chunks
    begin = at - at % chunk_nbytes
    assert (raised.value.offset, raised.value.nbytes) == (
        begin,
        min(chunk_nbytes, data.nbytes - begin),
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_whole_array_is_checked_too(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes, in_place: bool
) -> None:
    source = random_bytes.at(5_000_000, 0)  # aligned, so it is written directly
    sums = tensorferry.Checksums(1 << 20, segments=True)
    with tensorferry.open(directory / "file", "w+", engine=engine) as file:
        file.write(source, checksums=sums)
        assert sums.chunks == crcs(source.tobytes(), 1 << 20)
        assert sums.segments == [zlib.crc32(source)]
        target = aligned(source.nbytes)
        before = file.stats()
        check = tensorferry.Checksums(1 << 20, expected=sums.chunks, in_place=in_place)
        file.read(target, checksums=check)
        copied = file.stats()["bounced_nbytes"] - before["bounced_nbytes"]
        assert (copied < BLOCK) == (in_place or copied == 0)  # 0 if the whole file is cached
    assert (target == source).all()


def test_functions_take_any_iterable(directory: pathlib.Path) -> None:
    path = directory / "file"
    parts = {"a": b"12", "b": np.arange(3, dtype=np.uint8), "c": torch.tensor([7, 8]).byte()}
    tensorferry.write(path, parts.values())
    assert path.read_bytes() == b"12\x00\x01\x02\x07\x08"
    tensorferry.write(path, (bytes([n]) for n in range(5)), 1, truncate=True)
    assert path.read_bytes() == b"1\x00\x01\x02\x03\x04"
    target = bytearray(2)
    found = tensorferry.read(path, iter([1, target, 3]))
    assert found == [1, b"\x00\x01", 3]
    assert found[1] is target
    assert tensorferry.read(path, []) == []
    tensorferry.write(path, [], truncate=True)
    assert path.read_bytes() == b""


def test_what_is_no_array_is_named_before_anything_is_touched(directory: pathlib.Path) -> None:
    path = directory / "file"
    with pytest.raises(TypeError, match=r"array\[1\]: expected a torch tensor"):
        tensorferry.write(path, [b"1", 5])
    with pytest.raises(TypeError, match=r"array: expected an array, got str"):
        tensorferry.write(path, "text")
    with pytest.raises(TypeError, match="array: expected a torch tensor"):
        tensorferry.write(path, {"a": b"1"})
    with pytest.raises(ValueError, match=r"array\[1\]: cannot read into a read-only buffer"):
        tensorferry.read(path, [bytearray(1), b"1"])
    with pytest.raises(ValueError, match=r"array\[0\]: invalid number of bytes to skip .got -1"):
        tensorferry.read(path, [-1])
    with pytest.raises(ValueError, match="more bytes than a file can hold"):
        tensorferry.read(path, [1 << 62, 1 << 62])
    for nothing in ([1, 2], range(3), torch.zeros(2, 3).shape, deque([1])):
        with pytest.raises(TypeError, match="nothing to fill"):
            tensorferry.read(path, nothing)
    for other in ({b"1"}, torch.zeros(4).byte().untyped_storage(), Rows()):
        with pytest.raises(TypeError, match="expected a torch tensor"):
            tensorferry.read(path, other)
    with pytest.raises(ValueError, match="array: the iterable"):
        tensorferry.write(path, raising())
    assert not path.exists()


class Rows:
    """An array of another library's, which gives copies of its rows."""

    def __array__(self) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter([bytearray(4)])


def raising() -> Any:
    yield b"1"
    raise ValueError("array: the iterable ended badly")


def test_checksums_that_make_no_sense_are_refused(directory: pathlib.Path) -> None:
    path = directory / "file"
    sums = tensorferry.Checksums
    for arguments, message in (
        ((), "at least one must be given"),
        ((4095,), "chunk_nbytes: 4095 is not between"),
        (((4 << 20) + 1,), "is not between"),
    ):
        with pytest.raises(ValueError, match=message):
            sums(*arguments)
    with pytest.raises(ValueError, match=r"expected\[1\]: not an unsigned 32-bit integer .got -1"):
        sums(4096, expected=[0, -1])
    with pytest.raises(ValueError, match="in_place: requires expected="):
        sums(4096, in_place=True)
    with pytest.raises(ValueError, match="requires chunk_nbytes"):
        sums(segments=True, expected=[1])
    with pytest.raises(ValueError, match="expected= is only for reads"):
        tensorferry.write(path, b"1", checksums=sums(4096, expected=[1]))
    path.write_bytes(bytes(5000))
    with pytest.raises(
        ValueError, match="5000 bytes have 2 chunks of 4096 bytes, but expected= has 1"
    ):
        tensorferry.read(path, bytearray(5000), checksums=sums(4096, expected=[1]))
    used = sums(4096)
    with pytest.raises(ValueError, match="not complete"):
        assert used.chunks
    with pytest.raises(tensorferry.StorageError):
        tensorferry.read(directory / "missing", bytearray(1), checksums=used)  # which leaves them
    tensorferry.read(path, bytearray(5000), checksums=used)
    with pytest.raises(ValueError, match="has been used by another transfer"):
        tensorferry.read(path, bytearray(5000), checksums=used)


@pytest.mark.usefixtures("default_engine")
@in_turn
@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=2, max_size=6),
    many=st.booleans(),
)
def test_destinations_that_share_memory_are_refused(
    directory: pathlib.Path, ranges: list[tuple[int, int]], many: bool
) -> None:
    path, data = directory / "file", bytes(range(1, 121))
    path.write_bytes(data)
    memory = np.zeros(80, np.uint8)
    parts = [memory[begin : begin + nbytes] for begin, nbytes in ranges]
    at = [0, *itertools.accumulate(map(len, parts))]
    shared = any(np.shares_memory(*pair) for pair in itertools.combinations(parts, 2))

    def read() -> None:
        if many:
            tensorferry.read_many([(path, part, at[n]) for n, part in enumerate(parts)])
        else:
            tensorferry.read(path, parts)

    if shared:
        with pytest.raises(ValueError, match=r"(items|array)\[\d\]: shares memory with"):
            read()
        assert not memory.any()
    else:
        read()
        assert joined(parts) == data[: at[-1]]


@pytest.mark.parametrize("kind", ["write", "fsync"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_transfer_that_fails_gives_no_checksums(
    default_engine: str, faultfs: FaultFS, kind: str, blocking: bool
) -> None:
    sums, data = tensorferry.Checksums(4096, segments=True), bytes(10_000)
    with tensorferry.open(faultfs.path / "file", "w", engine=default_engine) as file:
        faultfs.order(Fault(kind, error=errno.EIO))
        start = file.write_from(data, sync=True, checksums=sums) if not blocking else None
        with pytest.raises(tensorferry.StorageError):
            start.result() if start else file.write(data, sync=True, checksums=sums)
    for name in ("chunks", "segments"):
        with pytest.raises(ValueError, match="not complete"):
            getattr(sums, name)


def test_a_chunk_that_the_bounce_pool_has_no_room_for_is_refused(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    data = random_bytes(5 << 20)
    data.tofile(path)
    expected = crcs(data.tobytes(), 4 << 20)
    before = tensorferry.bounce_pool_nbytes()
    tensorferry.set_bounce_pool_nbytes(1 << 20)
    try:
        for direct in (True, False):
            sums = tensorferry.Checksums(4 << 20, expected=expected)
            with (
                tensorferry.open(path, engine=engine, direct=direct) as file,
                pytest.raises(tensorferry.StorageError, match="has no room for a block") as raised,
            ):
                file.read_into(bytearray(data.nbytes), checksums=sums).result()
            assert raised.value.errno == errno.ENOMEM
    finally:
        tensorferry.set_bounce_pool_nbytes(before)


def test_an_end_of_the_file_within_segments_is_told(engine: str, directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(range(200)))
    targets = [bytearray(150), bytearray(100)]
    with (
        tensorferry.open(path, engine=engine) as file,
        pytest.raises(tensorferry.ShortReadError) as raised,
    ):
        file.read(targets)
    assert (raised.value.offset, raised.value.expected) == (200, 250)


def test_arrays_of_a_transfer_are_kept_until_it_is_done(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    source = random_bytes(40 << 20)
    parts = [torch.from_numpy(part.copy()) for part in np.array_split(source, 1000)]
    seen = [weakref.ref(part.untyped_storage()) for part in parts]
    faultfs.order(Fault("write", hold=True))
    with tensorferry.open(faultfs.path / "file", "w", engine=engine) as file:
        future = file.write_from(iter(parts))
        del parts
        faultfs.await_held()
        gc.collect()
        assert all(one() is not None for one in seen)
        faultfs.release()
        future.result()
        del future
    gc.collect()
    assert all(one() is None for one in seen)
    assert (np.fromfile(faultfs.backing / "file", np.uint8) == source).all()


def test_an_array_that_gives_its_memory_back_is_told(engine: str, faultfs: FaultFS) -> None:
    # Small parts: free() keeps their pages, while a read of unmapped pages would crash.
    parts = [torch.zeros(64 << 10, dtype=torch.uint8) for _ in range(8)]
    with tensorferry.open(faultfs.path / "file", "w", engine=engine) as file:
        faultfs.order(Fault("write", hold=True))
        future = file.write_from(parts)
        faultfs.await_held()
        parts[5].resize_(64 << 20)
        faultfs.release()
        with pytest.raises(tensorferry.StorageError, match="the array's memory was released"):
            future.result()


@pytest.mark.parametrize("several", [True, False])
def test_a_future_that_its_array_refers_to_is_collected(
    directory: pathlib.Path, several: bool
) -> None:
    class Array(np.ndarray):
        future: object

    (directory / "file").write_bytes(bytes(5000))
    with tensorferry.open(directory / "file") as file:
        array = np.zeros(5000, np.uint8).view(Array)
        seen = weakref.ref(array)
        array.future = file.read_into([array] if several else array)
        del array
        while seen() is not None:  # a hang would end the run
            file.read(bytearray(1))
            gc.collect()


def test_a_read_that_fails_half_way_says_what_has_been_filled(directory: pathlib.Path) -> None:
    """Blocks of 64 KiB, one of them damaged: the blocks that were moved are in their arrays."""
    path = directory / "file"
    data = np.arange(40 * BLOCK, dtype=np.uint8) | 1
    data.tofile(path)
    expected = crcs(data.tobytes(), BLOCK)
    expected[7] ^= 1
    targets = [np.zeros(BLOCK // 2, np.uint8) for _ in range(80)]
    with pytest.raises(tensorferry.ChecksumError) as raised:
        tensorferry.read(path, targets, checksums=tensorferry.Checksums(BLOCK, expected=expected))
    filled = sum(int(target.all()) * target.nbytes for target in targets)
    assert raised.value.transferred == filled < data.nbytes


def test_thousands_of_small_ones_are_few_blocks(engine: str, directory: pathlib.Path) -> None:
    parts = [bytes([index % 256]) * 4096 for index in range(8192)]
    with tensorferry.open(directory / "file", "w+", engine=engine, direct=True) as file:
        file.write(parts)
        before = file.stats()
        targets = [bytearray(4096) for _ in parts]
        file.read(targets)
        after = file.stats()
    assert all(map(bytes.__eq__, parts, map(bytes, targets)))
    blocks = after["engine_blocks"] - before["engine_blocks"]
    assert blocks <= sum(map(len, parts)) // (1 << 20) + 2


def test_many_threads_share_a_file(engine: str, directory: pathlib.Path) -> None:
    """Concurrent gathered writes, with and without checksums, and reads of the written bytes."""
    count, nbytes = 8, 3 << 20
    with tensorferry.open(directory / "file", "w+", engine=engine) as file:
        futures = []
        wanted = []
        for index in range(count):
            parts = arrays_of([(50_001, 1)] * 63, index)
            wanted.append(joined(parts)[:nbytes])
            sums = tensorferry.Checksums(BLOCK) if index % 2 else None
            futures.append((file.write_from(parts, index * 4_000_000, checksums=sums), sums))
        for (future, sums), data in zip(futures, wanted, strict=True):
            whole = joined(future.result())
            assert whole.startswith(data)
            if sums is not None:
                assert sums.chunks == crcs(whole, BLOCK)
        for index, data in enumerate(wanted):
            targets = [bytearray(n) for n in itertools.repeat(70_000, 44)]
            file.read(targets, index * 4_000_000)
            assert b"".join(targets)[:nbytes] == data[: 44 * 70_000]
