"""Functions and files: any size, offset, alignment and dtype, on every engine, compared with plain Python."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.npy import NumpyFile
from tensorferry.transfer import runtime
from tests.conftest import takes_direct_io
from tests.support import mounts, page_cache
from tests.support.data import aligned, folded
from tests.support.effort import examples
from tests.support.expect import assert_equal, storage_error
from tests.support.forks import passes_in_child
from tests.support.optional import torch

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes

BLOCK = 65536

# Sizes and offsets at the boundaries of sectors, pages and blocks, and next to them.
edges = st.sampled_from(
    [0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 8192, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]
)
sizes = st.one_of(edges, st.integers(0, 5 * BLOCK))
in_turn = settings(max_examples=examples(40))


@in_turn
@given(
    steps=st.lists(
        st.tuples(sizes, sizes, st.sampled_from([0, 4, 64, 512]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    direct=st.sampled_from(["auto", True, False]),
    queue_depth=st.sampled_from([1, 2, 32]),
)
def test_any_sequence_of_writes_and_reads_equals_plain_files(
    engine: str,
    directory: pathlib.Path,
    steps: list[tuple[int, int, int, bool]],
    direct: bool | str,
    queue_depth: int,
) -> None:
    path = directory / "steps"
    path.unlink(missing_ok=True)
    model = bytearray()
    with tensorferry.open(
        path, "w+", engine=engine, block_size=BLOCK, queue_depth=queue_depth, direct=direct
    ) as file:
        for seed, (nbytes, offset, misalignment, waits) in enumerate(steps):
            source = aligned(nbytes, misalignment)
            source[:] = numpy.random.default_rng(seed).integers(0, 256, nbytes, numpy.uint8)
            if waits:
                file.write_from(source, offset).result()
            else:
                file.write(source, offset)
            if nbytes:
                model.extend(bytes(max(0, offset + nbytes - len(model))))
                model[offset : offset + nbytes] = source.tobytes()
            begin = min(offset // 2, len(model))
            found = aligned(min(nbytes + 9, len(model) - begin), misalignment)
            file.read(found, begin)
            assert found.tobytes() == model[begin : begin + found.nbytes]
    assert path.read_bytes() == model


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_every_dtype_and_shape_of_torch(directory: pathlib.Path, name: str) -> None:
    dtype = getattr(torch, name)
    path = directory / "tensor"
    for shape in ((), (0,), (3,), (5, 7), (2, 3, 1001)):
        source = torch.arange(torch.Size(shape).numel()).view(shape).remainder(5).to(dtype)
        tensorferry.write(path, source, truncate=True)
        found = torch.empty(shape, dtype=dtype)
        assert tensorferry.read(path, found) is found
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found,
            source.view(torch.uint8) if source.dim() else source,
        )
        assert path.stat().st_size == source.nbytes


def test_beyond_4_gib(directory: pathlib.Path) -> None:
    """A sparse file, read at both ends and across 4 GiB; the hole costs no disk."""
    path = directory / "large"
    with tensorferry.open(path, "w+") as file:
        file.write(b"begin", 3)
        file.write(b"across", (1 << 32) - 3)
        file.write(b"end", 5 << 30)
        for text, offset in ((b"begin", 3), (b"across", (1 << 32) - 3), (b"end", 5 << 30)):
            assert bytes(file.read(bytearray(len(text)), offset)) == text
        assert file.size == (5 << 30) + 3


def test_one_transfer_of_more_than_4_gib(directory: pathlib.Path) -> None:
    # A read system call moves at most 2 GiB, and 32-bit offsets end at 4 GiB. Holes use no space on the drive, and
    # folded arrays use no memory.
    nbytes = (4 << 30) + 4097
    marks = (0, (2 << 30) - 5, (2 << 30) + 4096, (4 << 30) - 1, nbytes - 1)
    path = directory / "hole"
    with open(path, "wb") as plain:
        plain.truncate(nbytes + 5)
        for number, mark in enumerate(marks, 1):
            os.pwrite(plain.fileno(), bytes([number]), mark + 1)
    found = folded(nbytes, [slice(max(mark - 8192, 0), mark + 8192) for mark in marks])
    found[::4096] = 9
    tensorferry.read(path, found, 1)
    assert [found[mark] for mark in marks] == [1, 2, 3, 4, 5]
    found[list(marks)] = 0
    assert not any(part.any() for part in numpy.array_split(found, 64))


def test_writing_into_a_longer_file_keeps_its_end_unless_truncated(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * 10_000)
    tensorferry.write(path, b"y" * 5_000, 0)
    assert path.read_bytes() == b"y" * 5_000 + b"x" * 5_000
    tensorferry.write(path, b"z" * 100, 50, truncate=True)
    assert path.read_bytes() == b"y" * 50 + b"z" * 100


def test_new_files_get_the_usual_mode(directory: pathlib.Path) -> None:
    mask = os.umask(0o022)
    try:
        tensorferry.write(directory / "new", b"1")
    finally:
        os.umask(mask)
    assert (directory / "new").stat().st_mode & 0o777 == 0o644


def test_paths_of_every_type(directory: pathlib.Path) -> None:
    for path in (
        directory / "p",
        str(directory / "s"),
        os.fsencode(directory / "b"),
        directory / "n\udcff",
    ):
        tensorferry.write(path, b"content")
        assert bytes(tensorferry.read(path, bytearray(7))) == b"content"
    for wrong in (None, 1.5, object()):
        with pytest.raises(TypeError):
            tensorferry.write(wrong, b"")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        tensorferry.write("a\0b", b"")


@pytest.mark.parametrize("direct", ["auto", True, False])
def test_cached_dirty_and_partly_cached_files_read_right(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes, direct: bool | str
) -> None:
    path = directory / "cached"
    data = bytearray(random_bytes(3_000_000))
    path.write_bytes(data)  # dirty in the page cache
    with tensorferry.open(path, engine=engine, block_size=BLOCK, direct=direct) as file:
        assert file.read(bytearray(len(data))) == data
        page_cache.make_cold(path, 1_000_000)
        with open(path, "r+b") as plain:
            assert file.read(bytearray(len(data))) == data
            plain.seek(2_000_000)
            plain.write(b"changed")
            plain.flush()
            data[2_000_000:2_000_007] = b"changed"
            assert file.read(bytearray(len(data))) == data


def test_parts_in_the_page_cache_are_read_from_it(directory: pathlib.Path) -> None:
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 5):
        pytest.skip("this kernel has no cachestat(2)")
    path = directory / "cached"
    path.write_bytes(bytes(4_000_000))
    page_cache.make_warm(path)
    buffer = tensorferry.empty(4_000_000, "u1")

    def from_cache(file: tensorferry.File) -> int:
        before = file.stats()["buffered_nbytes"]
        file.read(buffer)
        return file.stats()["buffered_nbytes"] - before

    with tensorferry.open(path, block_size=BLOCK) as file:
        assert from_cache(file) == 4_000_000
        page_cache.make_cold(path, 1 << 20)
        direct_nbytes = file.stats()["direct_nbytes"]
        assert 0 < from_cache(file) < 4_000_000
        assert file.stats()["direct_nbytes"] > direct_nbytes


def test_memory_file_systems_refuse_forced_direct(tmpfs_directory: pathlib.Path) -> None:
    path = tmpfs_directory / "file"
    path.write_bytes(b"12345")
    with pytest.raises(tensorferry.StorageError, match="direct"):
        tensorferry.read(path, bytearray(5), direct=True)


def test_many_small_files_and_pieces(directory: pathlib.Path, random_bytes: RandomBytes) -> None:
    arrays = [random_bytes(17 * index % 9001).tobytes() for index in range(1_000)]
    tensorferry.write_many([(directory / str(index), array) for index, array in enumerate(arrays)])
    found = [bytearray(len(array)) for array in arrays]
    tensorferry.read_many([(directory / str(index), array) for index, array in enumerate(found)])
    assert found == arrays
    offsets = numpy.cumsum([0] + [len(array) for array in arrays])
    tensorferry.write_many(
        [(directory / "one", array, int(at)) for array, at in zip(arrays, offsets, strict=False)]
    )
    assert (directory / "one").read_bytes() == b"".join(arrays)


@pytest.mark.parametrize("shuffled", [False, True])
def test_many_neighbours_are_a_few_transfers(
    directory: pathlib.Path, random_bytes: RandomBytes, shuffled: bool
) -> None:
    data = random_bytes(2_000 * 1_024)
    order = list(range(2_000))
    if shuffled:
        random.Random(6).shuffle(order)
    stats = runtime.default_scheduler().stats
    blocks = [stats()["engine_blocks"] + stats()["inline_blocks"]]
    path = directory / "file"
    tensorferry.write_many([(path, data[at * 1_024 :][:1_024], at * 1_024) for at in order])
    blocks.append(stats()["engine_blocks"] + stats()["inline_blocks"])
    assert path.read_bytes() == data.tobytes()
    # Small gaps are read through.
    found = {at: numpy.zeros(700, numpy.uint8) for at in order}
    tensorferry.read_many([(path, found[at], at * 1_024) for at in order])
    blocks.append(stats()["engine_blocks"] + stats()["inline_blocks"])
    for at in order:
        assert (found[at] == data[at * 1_024 :][:700]).all()
    assert blocks[1] - blocks[0] < 100
    assert blocks[2] - blocks[1] < 100


def test_many_writes_that_overlap_keep_their_order(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    generator = random.Random(7)
    wanted = bytearray(100_000)
    items = []
    for _ in range(1_000):
        at, nbytes = generator.randrange(90_000), generator.randrange(1, 10_000)
        array = random_bytes(nbytes).tobytes()
        wanted[at : at + nbytes] = array
        items.append((directory / "file", array, at))
    tensorferry.write_many(items)
    found = (directory / "file").read_bytes()
    assert found == wanted[: len(found)]


def test_a_piece_behind_the_end_fails_alone(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(range(100)))
    arrays = [bytearray(30) for _ in range(4)]
    with pytest.raises(tensorferry.ShortReadError) as caught:
        tensorferry.read_many([(path, arrays[at], at * 30) for at in (3, 1, 0, 2)])
    assert (caught.value.offset, caught.value.expected, caught.value.others) == (100, 30, ())
    assert b"".join(arrays[:3]) == bytes(range(90))


@pytest.mark.parametrize(
    "bad", ["a\0b", "bad\ud800", 5.5, None, True, 1 << 40, ["list"]], ids=ascii
)
def test_many_looks_at_every_path_before_it_opens_one(directory: pathlib.Path, bad: Any) -> None:
    items: list[Any] = [(directory / str(index), b"data") for index in range(300)]
    with pytest.raises((TypeError, ValueError), match=r"items\[300\]"):
        tensorferry.write_many([*items, (bad, b"data")])
    assert list(directory.iterdir()) == []


def test_many_reports_the_first_that_failed_and_knows_the_rest(directory: pathlib.Path) -> None:
    (directory / "good").write_bytes(b"12345")
    with pytest.raises(tensorferry.StorageError) as caught:
        tensorferry.read_many(
            [
                (directory / "good", bytearray(5)),
                (directory / "none", bytearray(1)),
                (directory / "nil", bytearray(1)),
            ]
        )
    assert caught.value.filename == str(directory / "none")
    assert [other.filename for other in caught.value.others] == [str(directory / "nil")]
    for wrong in ([("a",)], ["ab"], [("a", b"", 0, 0)], [("a", 1)]):
        with pytest.raises(TypeError, match=r"items\[0\]: "):
            tensorferry.write_many(wrong)  # type: ignore[arg-type]


def test_bad_arguments_are_refused_before_any_io(directory: pathlib.Path) -> None:
    path = directory / "never"
    for offset in (-1, 1 << 63, (1 << 63) - 2):
        with pytest.raises(ValueError, match="offset"):
            tensorferry.write(path, b"abc", offset)
    with pytest.raises(TypeError, match="offset"):
        tensorferry.write(path, b"abc", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direct"):
        tensorferry.write(path, b"abc", direct="perhaps")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode"):
        tensorferry.open(path, "rw")
    with pytest.raises(ValueError, match="block_size"):
        tensorferry.open(path, "w", block_size=0)
    with pytest.raises(ValueError, match="engine"):
        tensorferry.open(path, "w", engine="windows")
    for call in (tensorferry.read, tensorferry.write):
        with pytest.raises(ValueError, match="priority: 'urgent' is not one of"):
            call(path, bytearray(5), priority="urgent")  # type: ignore[operator]
    for many in (tensorferry.read_many, tensorferry.write_many):
        with pytest.raises(ValueError, match="priority: 7 is not one of"):
            many([(path, bytearray(5))], priority=7)  # type: ignore[operator]
    for setting, maximum in (("queue_depth", 32768), ("block_size", 1 << 30)):
        for value in (0, -1, maximum + 1, (1 << 31) - 1, 1 << 80):
            with pytest.raises(ValueError, match=f"{setting}: {value} is not between 1 and"):
                tensorferry.open(path, "w", **{setting: value})
            with pytest.raises(ValueError, match=f"{setting}: {value} is not between 1 and"):
                tensorferry.aio_handle(**{setting: value})
        with pytest.raises(TypeError, match=setting):
            tensorferry.open(path, "w", **{setting: 1.5})
    assert not path.exists()


def test_work_in_the_background_is_done_like_any_other(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    data = random_bytes(300_001).tobytes()
    with tensorferry.open(path, "w+", engine=engine) as file:
        file.write(data, priority="background")
        assert file.read(bytearray(len(data)), priority="background") == data
        assert file.write_from(data, 5, priority="background").result() is data
        assert file.read_into(bytearray(len(data)), 5, priority="background").result() == data
        with pytest.raises(ValueError, match="priority"):
            file.read_into(bytearray(1), priority="low")  # type: ignore[arg-type]
    tensorferry.write_many([(path, data)], truncate=True, priority="background")
    buffer = bytearray(len(data))
    tensorferry.read_many([(path, buffer)], priority="background")
    assert buffer == data


def test_file_modes(directory: pathlib.Path) -> None:
    path = directory / "file"
    with storage_error(errno.ENOENT, path):
        tensorferry.open(path)
    with tensorferry.open(path, "x") as file:
        file.write(b"12345")
        with pytest.raises(ValueError, match="reading"):
            file.read(bytearray(1))
    with storage_error(errno.EEXIST, path):
        tensorferry.open(path, "x")
    with tensorferry.open(path) as file:
        assert file.size == 5
        with pytest.raises(ValueError, match="writing"):
            file.write(b"1")
    with tensorferry.open(path, "w"):
        pass
    assert path.read_bytes() == b""
    with pytest.raises(ValueError, match="closed"):
        file.read(bytearray(1))


def test_preallocated_space_is_there_and_can_be_cut(directory: pathlib.Path) -> None:
    path = directory / "file"
    with tensorferry.open(path, "w") as file:
        file.preallocate(1 << 20, 1000)
        assert path.stat().st_blocks * 512 >= 1 << 20
        assert file.size == (1 << 20) + 1000
        file.preallocate(10)  # ends before the end of the file, so it has no effect
        file.truncate(100)
        assert file.size == 100
        with pytest.raises(ValueError, match="nbytes"):
            file.preallocate(-1)
        with pytest.raises(tensorferry.StorageError):
            file.preallocate(1 << 60)
        assert file.size == 100
    with tensorferry.open(path) as file, pytest.raises(ValueError, match="writ"):
        file.preallocate(1)


def test_errors_say_what_and_survive_pickling(directory: pathlib.Path) -> None:
    (directory / "short").write_bytes(b"12345")
    with pytest.raises(tensorferry.ShortReadError) as caught:
        tensorferry.read(directory / "short", bytearray(10), 2)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, tensorferry.ShortReadError)
    assert (error.offset, error.expected, error.transferred) == (5, 10, 0)
    assert error.filename == str(directory / "short")
    assert "5 bytes" in str(error)


def test_an_error_keeps_the_others_of_its_call_when_it_is_pickled_or_copied() -> None:
    others = tuple(tensorferry.ShortReadError(None, "End", f"b{i}", offset=i) for i in range(2))
    error = tensorferry.StorageError(5, "Input/output error", "a", offset=3, others=others)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert [(type(each), each.filename, each.offset) for each in again.others] == [
            (tensorferry.ShortReadError, "b0", 0),
            (tensorferry.ShortReadError, "b1", 1),
        ]
        assert str(again) == str(error)
    assert tensorferry.StorageError(5, "Input/output error", "a").others == ()


@pytest.mark.root
def test_what_lies_below_an_overlay_in_the_page_cache_is_read_from_there(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    nbytes = 4_000_000
    for name in ("lower", "upper", "work"):
        (directory / name).mkdir()
    below = directory / "lower" / "model"
    data = random_bytes(nbytes)
    data.tofile(below)
    options = ",".join(f"{name}dir={directory / name}" for name in ("lower", "upper", "work"))
    with (
        mounts.mounted(directory / "overlay", "-t", "overlay", "-o", options, "overlay") as mount,
        tensorferry.open(mount / "model", engine=engine) as file,
    ):
        found = tensorferry.empty(nbytes, "u1")

        def read() -> tuple[int, int]:
            """Return how much of it came from the cache, and from the drive."""
            before = file.stats()
            found[:] = 0
            assert_equal(file.read(found), data)
            after = file.stats()
            cached = after["buffered_nbytes"] - before["buffered_nbytes"]
            return cached, nbytes - cached

        page_cache.make_warm(below)
        assert read() == (nbytes, 0)
        small = [numpy.zeros(1000, numpy.uint8) for _ in range(10)]
        tensorferry.read_many([(mount / "model", array, 4096) for array in small])
        assert all(numpy.array_equal(array, data[4096:5096]) for array in small)

        def others_are_told_nothing() -> None:
            with tensorferry.open(mount / "model", engine=engine) as same:
                os.setuid(65534)
                assert same._open_file().residency(0, nbytes) is None
                assert_equal(same.read(numpy.zeros_like(data)), data)

        passes_in_child(others_are_told_nothing)
        if takes_direct_io(mount):
            page_cache.make_cold(below)
            assert read() == (0, nbytes)
            page_cache.make_cold(below)
            page_cache.make_warm(below, 0, 2 << 20)
            cached, from_drive = read()
            assert cached > 0
            assert from_drive > 0


def test_a_copy_is_the_same_object_and_does_not_end_the_original(
    directory: pathlib.Path,
) -> None:
    (directory / "file").write_bytes(b"12")
    data = bytearray(2)
    with tensorferry.aio_handle() as handle:
        copied = copy.copy(handle)
        del copied  # a handle closes its workers when it is deleted
        assert handle.sync_pread(data, directory / "file") == 1
    with tensorferry.open(directory / "file") as file:
        copy.copy(file).close()
        assert file.closed


def test_a_list_of_paths_is_refused_and_told_what_to_do(directory: pathlib.Path) -> None:
    for paths in ([directory / "a"], (directory / "a", directory / "b")):
        with pytest.raises(TypeError, match=r"expected one path, got a (list|tuple) \(remedy: "):
            tensorferry.open(paths, "w")  # type: ignore[arg-type]
    assert not list(directory.iterdir())


@pytest.mark.parametrize("kind", [tensorferry.File, tensorferry.Table, NumpyFile])
def test_what_is_not_made_completely_can_be_shown(kind: Any) -> None:
    assert f"{kind.__name__} object at" in repr(kind.__new__(kind))
