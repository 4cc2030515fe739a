"""Messages for a newcomer's plausible mistakes: they name the mistake and the remedy."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import re
import sys
import traceback
import warnings
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tests.support import commands
from tests.support.optional import torch

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("missing", "call", "told"),
    [
        (
            "torch",
            "empty(3)",
            "dtype: None means torch's default dtype, but torch is not installed",
        ),
        ("numpy", "empty(3, 'float32')", "dtype: 'float32' requires NumPy, which is not installed"),
    ],
)
def test_empty_names_the_library_that_it_lacks(missing: str, call: str, told: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import tensorferry; tensorferry.{call}"
    ended = commands.run(sys.executable, "-c", program)
    assert ended.returncode == 1
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert re.search(told, last), last


def test_empty_says_which_argument_is_none_of_its_kind() -> None:
    for shape in (1.5, [2, 1.5], "ab", None):
        with pytest.raises(
            TypeError, match=r"shape: expected an integer or a sequence of integers"
        ):
            tensorferry.empty(shape, "uint8")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="dtype: expected a dtype of torch or NumPy, got 'flaot'"):
        tensorferry.empty(3, "flaot")
    assert tensorferry.empty(torch.tensor(3), "uint8").shape == (3,)  # type: ignore[call-overload]


def test_a_locked_tensor_asks_for_an_example_where_it_is_given_a_dtype() -> None:
    handle = tensorferry.aio_handle()
    with pytest.raises(
        TypeError, match=r"example_tensor: expected a tensor, got the dtype torch.float32"
    ):
        handle.new_cpu_locked_tensor(10, torch.float32)
    with pytest.raises(TypeError, match="example_tensor: expected a torch tensor, got str"):
        handle.new_cpu_locked_tensor(10, "float32")
    handle.close()


def test_modes_are_those_that_everyone_types(directory: pathlib.Path) -> None:
    path = directory / "file"
    for mode in ("wb", "w+b", "wb+", "rb", "r+b", "rb+", "r", "r+"):
        with tensorferry.open(path, mode) as file:
            if mode != "rb" and mode != "r":
                file.write(b"1")
    for mode in ("b", "br", "rbb", "rt", "ab", "a", ""):
        with pytest.raises(
            ValueError, match=f"mode: {mode!r} is not one of r, r\\+, w, w\\+, x, x\\+"
        ):
            tensorferry.open(path, mode)
    with pytest.raises(ValueError, match="appending is not supported"):
        tensorferry.open(path, "ab")
    with pytest.raises(TypeError, match="mode: expected a str, got 5"):
        tensorferry.open(path, 5)  # type: ignore[call-overload]


UNSEEN = """
import numpy, os, resource, sys, tensorferry, warnings
path, how = sys.argv[1:]
if how == "lock":
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    tensorferry.empty(3_000_000, "uint8")
else:
    file = tensorferry.open(path)
    sums = tensorferry.Checksums(4096, expected=[1])
    file.read_into(bytearray(5), checksums=sums)
    if how == "exit":
        kept = [file.read_into(bytearray(5), checksums=tensorferry.Checksums(4096, expected=[1]))]
"""


@pytest.mark.parametrize(("how", "lines"), [("lock", [6]), ("closed", [10]), ("exit", [10, 12])])
def test_a_warning_names_the_line_of_the_program_that_it_is_about(
    directory: pathlib.Path, how: str, lines: list[int]
) -> None:
    program, path = directory / "program.py", directory / "file"
    program.write_text(UNSEEN.lstrip())
    path.write_bytes(b"short")
    if how == "lock" and os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    ended = commands.run(sys.executable, program, path, how)
    assert ended.returncode == 0, ended.stdout
    assert "sys:1" not in ended.stdout
    for line in lines:
        assert f"program.py:{line}: RuntimeWarning: " in ended.stdout


def test_representations_say_what_a_thing_is_and_how_it_is(directory: pathlib.Path) -> None:
    path = directory / "file"
    with tensorferry.open(path, "w+") as file:
        future = file.write_from(b"hello", 3)
        future.result()
        assert repr(future) == (
            f"<tensorferry.Future writing 5 bytes at offset 3 of {str(path)!r}: done>"
        )
        assert repr(file) == f"<tensorferry.File {str(path)!r}>"
    handle = tensorferry.aio_handle(queue_depth=7)
    assert repr(handle).startswith("<tensorferry.aio_handle(block_size=1048576, queue_depth=7, ")
    assert repr(handle).endswith(", 0 pending>")
    handle.async_pwrite(b"12", path)
    assert repr(handle).endswith(", 1 pending>")
    handle.close()
    assert repr(handle).endswith(": closed>")
    assert repr(tensorferry.aio_handle.__new__(tensorferry.aio_handle)).startswith("<")


def test_representations_of_checksums_and_streams_say_how_far_they_are(
    directory: pathlib.Path,
) -> None:
    path = directory / "file"
    sums = tensorferry.Checksums(4096, segments=True)
    wanted = "<tensorferry.Checksums chunk_nbytes=4096, segments=True: "
    assert repr(sums) == f"{wanted}unused>"
    with tensorferry.open(path, "w+") as file:
        with file.stream(5, checksums=sums) as stream:
            stream.append(bytes(10_000))
            appended = f"<tensorferry.Stream to {str(path)!r} from offset 5: 10000 bytes appended, "
            assert repr(stream) == f"{appended}open>"
            assert repr(sums) == f"{wanted}not complete>"
        assert repr(stream) == f"{appended}ended>"
        assert repr(sums) == f"{wanted}complete>"
    check = tensorferry.Checksums(4096, expected=sums.chunks)
    assert repr(check) == "<tensorferry.Checksums chunk_nbytes=4096, 3 expected: unused>"
    tensorferry.read(path, bytearray(10_000), offset=5, checksums=check)
    assert repr(check).endswith(": complete>")


def test_completion_shows_what_users_may_use() -> None:
    shown = [name for name in dir(tensorferry) if not name.startswith("_")]
    products = {"checkpoint", "deepspeed", "offload", "safetensors", "store"}
    assert set(shown) == {*tensorferry.__all__, *products}


@pytest.mark.parametrize("name", ["checkpoint", "deepspeed", "offload", "safetensors", "store"])
def test_completion_of_a_product_shows_what_users_may_use(name: str) -> None:
    if name in ("checkpoint", "offload"):
        pytest.importorskip("torch")
    product = importlib.import_module(f"tensorferry.{name}")
    shown = {each for each in dir(product) if not each.startswith("_")}
    assert shown == {*product.__all__}
    assert all(hasattr(product, each) for each in product.__all__)


# asyncio


def test_async_with_lets_other_tasks_go_on_and_ends_all_transfers(directory: pathlib.Path) -> None:
    path = directory / "file"

    async def main() -> None:
        async with tensorferry.open(path, "w+") as file:
            futures = [file.write_from(bytes(100_003), at << 20) for at in range(5)]
            assert not file.closed
        assert file.closed
        assert all(future.done() for future in futures)
        with pytest.raises(ValueError, match="closed"):
            async with file:
                pass
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with tensorferry.open(path) as file:
                future = file.read_into(bytearray(100_003))
                _ = 1 / 0
        assert future.result() == bytes(100_003)

    asyncio.run(main())


def test_a_task_cancelled_in_async_with_closes_its_file(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(5_000_000))
    files = []

    async def task() -> None:
        async with tensorferry.open(path) as file:
            files.append(file)
            await file.read_into(bytearray(5_000_000))
            await asyncio.sleep(60)

    async def main() -> None:
        running = [asyncio.create_task(task()) for _ in range(5)]
        await asyncio.sleep(0.01)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()
    assert len(files) == 5
    assert all(file.closed for file in files)


MANY_OPEN = """
import asyncio, resource, sys, tensorferry
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
folder = sys.argv[1]
tensorferry.write_many([(f"{folder}/{n}", bytes([n % 251]) * 5000) for n in range(1000)])

def read(number):
    return tensorferry.read(f"{folder}/{number}", bytearray(5000))

async def one(number, several):
    async with several, tensorferry.open(f"{folder}/{number}") as file:
        return await file.read_into(bytearray(5000))

async def with_threads():
    return await asyncio.gather(*(asyncio.to_thread(read, n) for n in range(1000)))

async def with_semaphore():
    several = asyncio.Semaphore(64)
    return await asyncio.gather(*(one(n, several) for n in range(1000)))

for main in (with_threads, with_semaphore):
    assert asyncio.run(main()) == [bytes([n % 251]) * 5000 for n in range(1000)]
files = []
try:
    while True:
        files.append(tensorferry.open(f"{folder}/{len(files)}"))
except tensorferry.StorageError as error:
    print(error.errno, len(files) > 200)
"""


def test_files_that_stay_open_end_with_the_limit_and_calls_by_path_wait(
    directory: pathlib.Path,
) -> None:
    """As described in the guide's page on limits."""
    ended = commands.run(sys.executable, "-c", MANY_OPEN, directory)
    assert ended.stdout.split() == ["24", "True"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tensorferry.Checksums(7),
        lambda: importlib.import_module("tensorferry.checkpoint").Checkpoints("", keep_last=-5),
        lambda: importlib.import_module("tensorferry.checkpoint").FileSystemReader("", verify="no"),
        lambda: importlib.import_module("tensorferry.checkpoint").FileSystemWriter("", nope=1),
    ],
)
def test_what_could_not_be_made_can_be_shown_in_a_traceback(make: Callable[[], object]) -> None:
    pytest.importorskip("torch")
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert "Error" in "".join(told.format())


def test_a_read_of_too_much_says_what_the_file_has_and_what_was_wanted(
    directory: pathlib.Path,
) -> None:
    path = directory / "short"
    path.write_bytes(bytes(100))
    for offset, end in ((0, 100), (50, 100), (500, 500)):
        told = f"the file has 100 bytes, but 200 were wanted from offset {offset}; nothing was read"
        with pytest.raises(tensorferry.ShortReadError, match=told) as caught:
            tensorferry.read(path, bytearray(200), offset)
        assert "moved" not in str(caught.value)
        error = caught.value
        assert (error.offset, error.expected, error.transferred) == (end, 200, 0)


def test_swapped_arguments_and_dicts_are_named(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    for swapped in ("t.bin", directory / "t.bin"):
        for call in (tensorferry.write, tensorferry.read):
            with pytest.raises(
                TypeError, match=r"got \w+ \(the path comes first, then the array\)"
            ):
                call(bytearray(4), swapped)
    with pytest.raises(TypeError, match=r"got dict \(remedy: .*tensorferry\.checkpoint\.save"):
        tensorferry.write("t.bin", {"a": bytearray(4)})  # type: ignore[arg-type]
    assert list(directory.iterdir()) == []


def test_checksums_of_another_type_are_refused_before_anything_happens(
    directory: pathlib.Path,
) -> None:
    missing, given = directory / "missing", {"checksums": True}
    refused = r"checksums: expected a tensorferry\.Checksums, got bool"
    with pytest.raises(TypeError, match=refused):
        tensorferry.read(missing, bytearray(4), **given)  # type: ignore[call-overload]
    for atomic in (False, True):
        with pytest.raises(TypeError, match=refused):
            tensorferry.write(missing, b"abcd", atomic=atomic, **given)  # type: ignore[arg-type]
    assert list(directory.iterdir()) == []
    with tensorferry.open(directory / "open", "w") as file:
        for call in (file.write, file.write_from):
            with pytest.raises(TypeError, match=refused):
                call(b"abcd", **given)  # type: ignore[operator]
        with pytest.raises(TypeError, match=refused):
            file.stream(**given)  # type: ignore[arg-type]
    assert (directory / "open").stat().st_size == 0


@pytest.mark.parametrize("atomic", [False, True])
def test_a_missing_folder_is_named(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    monkeypatch.chdir(directory)
    with pytest.raises(tensorferry.StorageError, match=r"the folder '.*nodir' does not exist"):
        tensorferry.write("nodir/a", b"1", atomic=atomic)
    with pytest.raises(tensorferry.StorageError) as caught:
        tensorferry.read("a", bytearray(1))
    assert "folder" not in str(caught.value)


def test_a_destination_with_gaps_names_the_remedy(directory: pathlib.Path) -> None:
    (directory / "a").write_bytes(bytes(4))
    for array in (memoryview(bytearray(8))[::2], torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="remedy: read into a contiguous array and copy it"):
            tensorferry.read(directory / "a", array)
