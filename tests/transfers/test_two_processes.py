"""Two processes that write and extend one file: neither loses bytes that the other has written."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import pytest

import tensorferry
from tests.support import child, page_cache
from tests.support.expect import assert_equal, contents
from tests.support.forks import assert_exits_with_zero, in_child

ROUNDS = 3
PIECES = 60

# How the other process writes (past the page cache, through it, or as any program does), and in which order both do.
MEETINGS = [
    ("core", "any order"),
    ("core", "appended"),
    ("cached", "any order"),
    ("plain", "appended"),
]


def pieces_of(number: int) -> tuple[Any, list[tuple[int, int]]]:
    """Return a file's bytes, and the ranges of its pieces: of all sizes, at any offset, aligned only by chance."""
    random = np.random.default_rng([number, PIECES])
    sizes = np.exp(random.uniform(0, np.log(400_000), PIECES)).astype(int)
    ends = np.cumsum(sizes).tolist()
    data = np.frombuffer(random.bytes(ends[-1]), np.uint8)
    return data, list(zip([0, *ends], ends, strict=False))


def write_by_turns(engine: str, directory: str, other: str, order: str) -> None:
    """Write files in rounds; a child writes every other piece at the same time."""
    tensorferry.write(f"{directory}/warm-up", np.zeros(1, np.uint8))
    for number in range(ROUNDS):
        path = pathlib.Path(directory) / f"file{number}"
        data, places = pieces_of(number)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(reader, 1)
            in_child(lambda: write_pieces(engine, other, order, path, data, places[1::2]))  # noqa: B023
        os.write(writer, b"!")
        write_pieces(engine, "core", order, path, data, places[::2])
        assert_exits_with_zero(pid)
        os.close(reader)
        os.close(writer)
        assert_equal(contents(path), data)
        # EIO if the kernel has detected a collision of direct and buffered writes.
        page_cache.make_cold(path)
        assert_equal(contents(path), data)


def write_pieces(
    engine: str, how: str, order: str, path: pathlib.Path, data: Any, places: list[tuple[int, int]]
) -> None:
    """Write pieces of a file: all concurrently in any order, or one after the other, each after the end of the last."""
    if how == "plain":
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
        for begin, end in places:
            assert os.pwrite(descriptor, data[begin:end], begin) == end - begin
        os.close(descriptor)
        return
    direct: Any = "auto" if how == "core" else False
    if order == "appended":
        for begin, end in places:
            tensorferry.write(path, data[begin:end], begin, direct=direct)
        return
    shuffled = [places[at] for at in np.random.default_rng(len(places)).permutation(len(places))]
    several, one_by_one = shuffled[::2], shuffled[1::2]
    handle = tensorferry.aio_handle(engine=engine, block_size=64 << 10, intra_op_parallelism=2)
    for begin, end in one_by_one:
        handle.async_pwrite(data[begin:end], path, begin)
    tensorferry.write_many([(path, data[b:e], b) for b, e in several], direct=direct)
    assert handle.wait() == len(one_by_one)


@pytest.mark.parametrize(("other", "order"), MEETINGS)
def test_two_processes_that_write_and_extend_one_file_lose_no_byte_of_either(
    engine: str, directory: pathlib.Path, other: str, order: str
) -> None:
    child.call(
        f"{__name__}:write_by_turns",
        environment={"TENSORFERRY_ENGINE": engine},
        engine=engine,
        directory=directory,
        other=other,
        order=order,
    )
