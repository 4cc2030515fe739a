"""Rows by number: the same rows as NumPy and torch select, from any layout, or an exception."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry import ShortReadError, StorageError, Table
from tensorferry.safetensors import SafetensorError
from tensorferry.safetensors.numpy import save_file
from tests.support import forks, page_cache
from tests.support.effort import examples
from tests.support.engines import one_engine
from tests.support.faultfs import Fault
from tests.support.optional import torch

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from tests.support.faultfs import FaultFS

DTYPES = ("uint8", "int16", "float32", "complex128", "bool")
row_sizes = st.one_of(
    st.sampled_from([1, 320, 511, 512, 4096, 4097, 5000, 9000, 70_000, 140_000]),
    st.integers(1, 10_000),
)
numbers = st.one_of(
    st.lists(st.integers(0, 1 << 30), max_size=60),
    st.lists(st.integers(0, 5), max_size=60),  # duplicates and neighbours
    st.builds(
        lambda begin, count: list(range(begin, begin + count)),
        st.integers(0, 30),
        st.integers(0, 300),
    ),
)


class Place:
    """A table of random rows in a new file, or in several safetensors files."""

    def __init__(
        self, directory: pathlib.Path, rows: int, row_nbytes: int, offset: int, count: int
    ) -> None:
        page_cache.let_go()  # of the file that was there
        generator = np.random.default_rng(rows * row_nbytes + offset)
        self.array = generator.integers(0, 256, (rows, row_nbytes), np.uint8)
        self.offset = offset
        self.paths = [directory / f"part{at}" for at in range(count)]
        if count == 1:
            tensorferry.write(self.paths[0], [bytes(offset), self.array, b"behind" * 2000])
        else:
            for path, part in zip(self.paths, np.array_split(self.array, count), strict=True):
                save_file({path.name: part}, path)

    def open(self, **options: Any) -> Table:
        if len(self.paths) == 1:
            return Table(self.paths[0], self.array.shape, np.uint8, self.offset, **options)
        options.pop("engine", None)
        names = [path.name for path in self.paths]
        return Table.from_safetensors(self.paths, names, framework="np", **options)

    def make(self, state: str) -> None:
        """Bring the whole table, nothing, or the first half of each file into the page cache."""
        for path in self.paths:
            page_cache.make_cold(path)
            nbytes = path.stat().st_size
            if state != "cold" and nbytes > 0:
                page_cache.make_warm(path, 0, nbytes if state == "warm" else nbytes // 2)


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    page_cache.let_go()


def small(directory: pathlib.Path, **options: Any) -> Place:
    return Place(directory, **{"rows": 100, "row_nbytes": 300, "offset": 7, "count": 1} | options)


@settings(max_examples=examples(100))
@given(
    row_nbytes=row_sizes,
    rows=st.integers(1, 400),
    offset=st.sampled_from([0, 1, 512, 4000, 8192]),
    chosen=numbers,
    negative=st.booleans(),
    count=st.sampled_from([1, 1, 3]),
    direct=st.sampled_from(["auto", "auto", True, False]),
    state=st.sampled_from(["cold", "warm", "half"]),
    misalignment=st.sampled_from([0, 64]),
    waits=st.booleans(),
)
def test_rows_are_those_that_an_index_chooses(
    engine: str,
    directory: pathlib.Path,
    row_nbytes: int,
    rows: int,
    offset: int,
    chosen: list[int],
    negative: bool,
    count: int,
    direct: Any,
    state: str,
    misalignment: int,
    waits: bool,
) -> None:
    rows = min(rows, max(1, 2_000_000 // row_nbytes))
    place = Place(directory, rows, row_nbytes, offset, count)
    ids = np.array(
        [number % rows - rows * (negative and number % 3 == 0) for number in chosen], np.int64
    )
    place.make(state)
    memory = np.full(len(ids) * row_nbytes + 8192, 0xEE, np.uint8)
    begin = 4096 + (misalignment - memory.ctypes.data) % 4096
    begin -= 4096 if begin + len(ids) * row_nbytes > memory.nbytes else 0
    out = memory[begin : begin + len(ids) * row_nbytes].reshape(len(ids), row_nbytes)
    with place.open(engine=engine, direct=direct) as table:
        found = table.gather_async(ids, out).result() if waits else table.gather(ids, out)
    assert found is out
    np.testing.assert_array_equal(out, place.array[ids])
    memory[begin : begin + out.nbytes] = 0xEE
    assert (memory == 0xEE).all()


@settings(max_examples=examples(60))
@given(
    row_nbytes=row_sizes,
    chosen=numbers,
    offset=st.sampled_from([0, 1, 4096]),
    count=st.sampled_from([1, 3]),
    direct=st.sampled_from(["auto", False]),
    sync=st.booleans(),
)
def test_scattered_rows_are_there_and_the_last_one_wins(
    engine: str,
    directory: pathlib.Path,
    row_nbytes: int,
    chosen: list[int],
    offset: int,
    count: int,
    direct: Any,
    sync: bool,
) -> None:
    rows = min(200, max(1, 2_000_000 // row_nbytes))
    place = Place(directory, rows, row_nbytes, offset, count)
    ids = [number % rows - rows * (number % 2) for number in chosen]
    new = np.random.default_rng(len(ids)).integers(0, 256, (len(ids), row_nbytes), np.uint8)
    with place.open(mode="r+", engine=engine, direct=direct) as table:
        table.scatter(ids, new, sync=sync)
        for number, row in zip(ids, new, strict=True):
            place.array[number] = row
        np.testing.assert_array_equal(table.gather(range(rows)), place.array)
    if count == 1:
        around = place.paths[0].read_bytes()
        assert not any(around[:offset])
        assert around[offset + place.array.nbytes :] == b"behind" * 2000


def test_a_mask_of_ids_is_not_ignored(directory: pathlib.Path) -> None:
    (directory / "table").write_bytes(bytes(20))
    ids = np.ma.masked_array([1, 2], [True, False])
    with Table(directory / "table", (5, 4), np.uint8, mode="r+") as table:
        for gather in (table.gather, table.gather_async):
            with pytest.raises(TypeError, match=r"^ids: a masked array"):
                gather(ids)
        with pytest.raises(TypeError, match=r"^ids: a masked array"):
            table.scatter(ids, np.ones((2, 4), np.uint8))
    assert (directory / "table").read_bytes() == bytes(20)


@one_engine
@settings(max_examples=examples(60))
@given(data=st.data(), name=st.sampled_from(DTYPES))
def test_the_result_has_the_ids_shape_and_the_table_s_dtype(
    engine: str, directory: pathlib.Path, data: st.DataObject, name: str
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=2)))
    array = np.random.default_rng(0).integers(0, 2, (50, *shape)).astype(name)
    (directory / "table").write_bytes(array.tobytes())
    ids = np.array(
        data.draw(st.lists(st.integers(-50, 49), min_size=24, max_size=24)),
        data.draw(st.sampled_from(["int8", "int16", "int32", "int64", ">i4"])),
    ).reshape(data.draw(st.sampled_from([(24,), (2, 3, 4), (24, 1), (1, 24)])))
    with Table(directory / "table", array.shape, name, engine=engine) as table:
        for given_ids in (ids, ids.tolist(), ids[0], ids[:0], ids.ravel()[0], int(ids.ravel()[0])):
            found = table.gather(given_ids)
            wanted = array[np.asarray(given_ids, np.int64)]
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert found.tobytes() == wanted.tobytes()


def test_torch_s_ids_and_dtypes_give_tensors_as_embedding_does(directory: pathlib.Path) -> None:
    weight = torch.randn(64, 40).to(torch.bfloat16)
    tensorferry.write(directory / "table", weight)
    ids = torch.tensor([[3, 3, 63], [0, 5, 3]])
    wanted = torch.nn.functional.embedding(ids, weight)
    for dtype in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        with Table(directory / "table", weight.shape, dtype) as table:
            for kind in (torch.int64, torch.int32, torch.uint8, torch.uint64):
                assert torch.equal(table.gather(ids.to(kind)), wanted)
            assert torch.equal(table.gather(ids.T), wanted.transpose(0, 1))
            assert torch.equal(table.gather([[3, 3, 63], [0, 5, 3]]), wanted)
            out = torch.empty(2, 3, 40, dtype=torch.bfloat16)
            assert table.gather(ids, out) is out
            assert torch.equal(out, wanted)
            with pytest.raises(
                TypeError, match=r"out: expected the table's dtype .* got torch.float16"
            ):
                table.gather(ids, out.to(torch.float16))
    with Table(directory / "table", (64, 40), "int16") as table:
        assert table.gather(ids).dtype == torch.int16  # since the ids are torch's
        assert table.gather(ids.numpy()).dtype == np.int16


@one_engine
def test_numbers_of_no_row_are_told_before_any_read(engine: str, directory: pathlib.Path) -> None:
    with small(directory).open(engine=engine) as table:
        out = np.zeros((2, 300), np.uint8)
        before = table._files[0].stats()
        wrong: tuple[tuple[Any, int], ...] = (
            ([0, 100], 100),
            ([-101, 200], -101),
            (np.array([3, (1 << 64) - 1], np.uint64), (1 << 64) - 1),
            ([0, 1 << 70], 1 << 70),
            (torch.tensor([0, -(1 << 63)]), -(1 << 63)),
        )
        for ids, bad in wrong:
            with pytest.raises(IndexError, match=f"^ids: {bad} is outside of a table of 100 rows"):
                table.gather(ids, out if isinstance(ids, list) else None)
        for ids in (
            [1.0],
            [True],
            np.array([True]),
            torch.tensor([1.5]),
            torch.tensor([False]),
            "12",
            None,
            [[1], [2, 3]],
        ):
            with pytest.raises(TypeError, match=r"^ids: "):
                table.gather(ids)
        with pytest.raises(ValueError, match=r"out: expected the shape \[3, 300\], got \[2, 300\]"):
            table.gather([1, 2, 3], out)
        with pytest.raises(
            ValueError, match="out: cannot read into an array that is not C-contiguous"
        ):
            table.gather([1, 2], np.zeros((300, 2), np.uint8).T)
        with pytest.raises(TypeError, match="out: expected a torch tensor or a NumPy array"):
            table.gather([1], [0])
        with pytest.raises(ValueError, match="was not opened for writing"):
            table.scatter([1, 2], out)
        assert not out.any()
        assert table._files[0].stats()["read_nbytes"] == before["read_nbytes"]


@one_engine
def test_tables_that_cannot_be_are_refused(engine: str, directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    with pytest.raises(
        ValueError,
        match=r"10 rows of 100 bytes at offset 1 end at 1001, but .* has 1000 bytes",
    ):
        Table(path, (10, 100), "uint8", 1, engine=engine)
    for shape, dtype, message in (
        ((), "uint8", "shape: "),
        ((-1, 5), "uint8", "shape: "),
        ((1.5,), "uint8", "shape: "),
        ((1,), "nothing", "dtype: expected a dtype of torch or NumPy"),
        ((1,), object, "dtype: "),
        ((1,), None, "dtype: "),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Table(path, shape, dtype, engine=engine)
    with pytest.raises(ValueError, match="mode: 'w' is not one of"):
        Table(path, (1,), "uint8", mode="w", engine=engine)
    for shape in ((0, 5), (10, 0), (0,)):
        with Table(path, shape, "float32", engine=engine) as table:
            assert table.gather([]).shape == (0, *shape[1:])
            assert table.gather_async([]).result().shape == (0, *shape[1:])
            with pytest.raises(IndexError):
                table.gather([shape[0]])
    with Table(path, (10, 0), "float32", engine=engine) as table:
        assert table.gather([3, -1]).shape == (2, 0)


def test_rows_of_a_sharded_model_follow_each_other(
    default_engine: str, directory: pathlib.Path
) -> None:
    safetensors = pytest.importorskip("tensorferry.safetensors.torch")
    weight = torch.randn(90, 33)
    model = directory / "model"
    model.mkdir()
    for at, (begin, end) in enumerate(((0, 40), (40, 41), (41, 90))):
        name = f"model-{at + 1:05d}-of-00003.safetensors"
        safetensors.save_file(
            {f"part{at}": weight[begin:end].contiguous(), f"x{at}": torch.ones(3)}, model / name
        )
    names = ["part0", "part1", "part2"]
    with Table.from_safetensors(model, names) as table:
        assert table.shape == (90, 33)
        ids = torch.randint(-90, 90, (500,))
        assert torch.equal(table.gather(ids), weight[ids])
        future = table.gather_async(ids)
        assert torch.equal(future.result(), weight[ids])
        assert torch.equal(table.gather([40]), weight[40:41])
        assert torch.equal(asyncio.run(_awaited(table, ids)), weight[ids])
        assert table.closed
    with Table.from_safetensors(model, ["part1", "part0"], framework="np", mode="r+") as table:
        new = np.random.default_rng(0).standard_normal((3, 33)).astype(np.float32)
        table.scatter([0, 1, -1], new)
        np.testing.assert_array_equal(table.gather([0, 1, 40]), new)
    with Table.from_safetensors(model, "part0") as table:
        np.testing.assert_array_equal(table.gather([0, 39]).numpy(), new[1:])
    with pytest.raises(ValueError, match="name: 'x0' has rows of F32"):
        Table.from_safetensors(model, ["part0", "x0"])
    with pytest.raises(Exception, match="no file has a tensor of this name"):
        Table.from_safetensors(model, "part3")


async def _awaited(table: Table, ids: Any) -> Any:
    async with table:
        return await table.gather_async(ids)


@settings(max_examples=examples(30))
@given(
    short=st.integers(1, 3000),
    fails=st.booleans(),
    bad=st.integers(0, 39),
    chosen=st.lists(st.integers(0, 39), min_size=1, max_size=60),
    direct=st.sampled_from(["auto", True]),
)
def test_short_and_failing_reads_give_the_rows_or_an_error(
    engine: str,
    faultfs: FaultFS,
    short: int,
    fails: bool,
    bad: int,
    chosen: list[int],
    direct: Any,
) -> None:
    faultfs.clear()
    array = np.random.default_rng(bad).integers(0, 256, (40, 5000), np.uint8)
    path = faultfs.path / "file"
    path.write_bytes(array.tobytes())
    faultfs.order(Fault("read", short=short))
    if fails:
        faultfs.order(Fault("read", start=bad * 5000, end=bad * 5000 + 1, error=errno.EIO))
    with Table(path, array.shape, "uint8", engine=engine, direct=direct) as table:
        if fails and bad in chosen:
            with pytest.raises(StorageError) as raised:
                table.gather(chosen)
            assert raised.value.errno == errno.EIO
            return
        # A row that fails may be read with others, since they share a page.
        with contextlib.suppress(StorageError) if fails else contextlib.nullcontext():
            np.testing.assert_array_equal(table.gather(chosen), array[chosen])


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_a_file_that_became_shorter_is_told(
    engine: str, directory: pathlib.Path, state: str
) -> None:
    place = small(directory)
    with place.open(engine=engine) as table:
        os.truncate(place.paths[0], 7 + 50 * 300)
        place.make(state)
        np.testing.assert_array_equal(table.gather([49, 3]), place.array[[49, 3]])
        with pytest.raises(ShortReadError):
            table.gather_async([50, 3]).result()
        with pytest.raises(ShortReadError):
            table.gather([3, 99])


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_a_file_has_lost_are_never_zeros(directory: pathlib.Path, count: int) -> None:
    """A write behind the new end would make zeros of them."""
    place = small(directory, count=count)
    with place.open(mode="r+") as table:
        os.truncate(
            place.paths[-1], place.paths[-1].stat().st_size - 300 * 20 - 12000 * (count == 1)
        )
        for rows in ([99], [0], [99, 0]):
            with pytest.raises(StorageError, match=r"but .* has"):
                table.scatter(rows, place.array[rows])
        np.testing.assert_array_equal(table.gather([3, 50]), place.array[[3, 50]])
        with pytest.raises(ShortReadError):
            table.gather([97])


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_file_that_was_saved_again_in_place_are_refused(
    directory: pathlib.Path, count: int
) -> None:
    """They may be at other offsets now."""
    weight = np.arange(120, dtype=np.float32).reshape(30, 4)
    paths = [directory / f"{at}.safetensors" for at in range(count)]
    for at, (path, part) in enumerate(zip(paths, np.array_split(weight, count), strict=True)):
        save_file({f"w{at}": part}, path)
    with Table.from_safetensors(paths, [f"w{at}" for at in range(count)], framework="np") as table:
        np.testing.assert_array_equal(table.gather([29, 3]), weight[[29, 3]])
        paths[-1].write_bytes(paths[-1].read_bytes())
        for gather in (table.gather, lambda rows: table.gather_async(rows).result()):
            with pytest.raises(SafetensorError, match="replaced or changed"):
                gather([29, 3])


def test_several_paths_are_refused_with_what_to_do_instead(directory: pathlib.Path) -> None:
    with pytest.raises(TypeError, match=r"path: expected one path, got a list \(remedy"):
        Table([directory / "a", directory / "b"], (1, 1), np.uint8)  # type: ignore[arg-type]


def test_pages_that_hold_nothing_wanted_are_not_read(engine: str, directory: pathlib.Path) -> None:
    place = Place(directory, rows=2000, row_nbytes=3000, offset=0, count=1)
    place.make("cold")
    ids = np.random.default_rng(1).integers(0, 2000, 300)
    pages = {
        page for row in ids for page in range(row * 3000 // 4096, (row * 3000 + 2999) // 4096 + 1)
    }
    with place.open(engine=engine, direct=True) as table:
        before = table._files[0].stats()
        table.gather(ids)
        after = table._files[0].stats()
    assert after["read_nbytes"] - before["read_nbytes"] <= 4096 * len(pages)
    assert after["engine_blocks"] - before["engine_blocks"] <= len(set(ids))


@settings(max_examples=examples(10))
@given(
    gone=st.sets(st.integers(0, 999), min_size=1, max_size=50),
    row_nbytes=st.sampled_from([300, 4096]),
)
def test_rows_that_have_left_the_page_cache_are_read_all_the_same(
    engine: str, directory: pathlib.Path, gone: set[int], row_nbytes: int
) -> None:
    place = Place(
        directory, rows=1000 * 8192 // row_nbytes, row_nbytes=row_nbytes, offset=0, count=1
    )
    place.make("warm")
    ids = np.arange(1000) * 8192 // row_nbytes
    for number in gone:  # most of these rows are not checked when the cache is queried
        page_cache.make_cold(place.paths[0], int(ids[number]) * row_nbytes // 4096 * 4096, 4096)
    with place.open(engine=engine) as table:
        np.testing.assert_array_equal(table.gather(ids), place.array[ids])


@one_engine
def test_memory_that_went_away_is_told(engine: str, directory: pathlib.Path) -> None:
    with small(directory).open(engine=engine) as table:
        out = torch.empty(5, 300, dtype=torch.uint8)
        future = table.gather_async(torch.arange(5), out)
        future._request.wait()
        out.untyped_storage().resize_(0)
        with pytest.raises(StorageError, match="memory was released"):
            future.result()


@one_engine
def test_a_closed_table_refuses_and_says_so(engine: str, directory: pathlib.Path) -> None:
    place = small(directory)
    table = place.open(engine=engine)
    future = table.gather_async([1])
    assert f"[100, 300] uint8 of {str(place.paths[0])!r}" in repr(table)
    assert len(table) == 100
    table.close()
    table.close()
    assert table.closed
    assert repr(table).startswith("<closed tensorferry.Table")
    np.testing.assert_array_equal(future.result(), place.array[[1]])
    calls: tuple[Callable[[], object], ...] = (
        lambda: table.gather([1]),
        lambda: table.gather_async([]),
        lambda: table.scatter([1], place.array[[1]]),
        table.__enter__,
    )
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_forked_child_has_tables_of_its_own(default_engine: str, directory: pathlib.Path) -> None:
    place = small(directory)
    with place.open() as table:
        table.gather([1])

        def child() -> None:
            with contextlib.suppress(RuntimeError):
                table.gather([1])
                raise AssertionError("it used its parent's threads")
            with place.open() as own:
                np.testing.assert_array_equal(own.gather([5]), place.array[[5]])

        forks.passes_in_child(child)
        np.testing.assert_array_equal(table.gather([2]), place.array[[2]])
