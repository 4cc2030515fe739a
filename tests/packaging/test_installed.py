"""Checks that an installed package works in any environment: with pytest, or alone as python test_installed.py."""

from __future__ import annotations

import asyncio
import os
import pathlib
import tempfile

import tensorferry

DATA = bytes(range(256)) * 4097 + b"ragged end"


def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=os.environ.get("TENSORFERRY_TEST_DIR"))


def test_what_was_written_is_read_by_every_engine() -> None:
    usable = [name for name, refusal in tensorferry.engines().items() if refusal is None]
    assert "threads" in usable
    with folder() as name:
        for engine in usable:
            path = pathlib.Path(name) / engine
            with tensorferry.open(path, "w+", engine=engine) as file:
                file.write(DATA)
                assert file.read(bytearray(len(DATA))) == DATA
                part = file.read_into(bytearray(1000), 4097).result()
                assert part == DATA[4097:5097]
            assert path.read_bytes() == DATA


def test_functions_and_the_handle_move_whole_files() -> None:
    with folder() as name:
        path = pathlib.Path(name) / "file"
        tensorferry.write(path, DATA, sync=True)
        tensorferry.write(path, DATA[:-7], atomic=True)
        assert path.read_bytes() == DATA[:-7]
        handle = tensorferry.aio_handle()
        buffer = bytearray(len(DATA) - 7)
        handle.async_pread(buffer, path)
        assert handle.wait() == 1
        assert buffer == DATA[:-7]


def test_failures_say_which_byte() -> None:
    with folder() as name:
        path = pathlib.Path(name) / "file"
        tensorferry.write(path, b"12345")
        try:
            tensorferry.read(path, bytearray(10))
        except tensorferry.ShortReadError as error:
            assert (error.offset, error.expected) == (5, 10)  # noqa: PT017  pytest may be absent
        else:
            raise AssertionError


def test_futures_can_be_awaited() -> None:
    async def main(path: pathlib.Path) -> None:
        async with tensorferry.open(path, "w+") as file:
            await file.write_from(DATA)
            assert await file.read_into(bytearray(len(DATA))) == DATA

    with folder() as name:
        asyncio.run(main(pathlib.Path(name) / "file"))


if __name__ == "__main__":
    for test in [value for key, value in list(globals().items()) if key.startswith("test_")]:
        test()
