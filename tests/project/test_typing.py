"""Type checks of programs that use the package, by mypy and pyright."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support import required

ROOT = pathlib.Path(__file__).parents[2]

# Lines with "# wrong" are errors, no others are.
PROGRAM = """
from __future__ import annotations

import array
import asyncio
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import numpy.typing
import torch
from typing_extensions import assert_type

import tensorferry
from tensorferry import Checksums, File, Future

tensor, ndarray = torch.empty(3), numpy.zeros(3)


def generated() -> Iterator[torch.Tensor]:
    yield tensor


assert_type(tensorferry.read("x", tensor), torch.Tensor)
assert_type(tensorferry.read(Path("x"), bytearray(3)), bytearray)
assert_type(tensorferry.read(b"x", memoryview(bytearray(3)), 7), "memoryview[int]")
assert_type(tensorferry.read("x", [tensor, tensor]), "list[torch.Tensor]")
assert_type(tensorferry.read("x", (tensor, ndarray), direct=False)[0], torch.Tensor)
assert_type(tensorferry.read("x", generated()), "list[Any]")
tensorferry.read("x", ndarray)
tensorferry.read("x", [4096, tensor, ndarray])
tensorferry.read("x", array.array("d"))
tensorferry.read("x", mmap.mmap(-1, 3))
tensorferry.read("x", "text")  # wrong
tensorferry.read("x", ["text"])  # wrong
tensorferry.read("x", 5)  # wrong
tensorferry.read("x", None)  # wrong
tensorferry.read(5.0, tensor)  # wrong
tensorferry.read("x", tensor, "7")  # wrong
tensorferry.read("x", tensor, direct="never")  # wrong

tensorferry.write("x", tensor)
tensorferry.write("x", b"bytes", 3, truncate=True, sync=True)
tensorferry.write("x", generated(), atomic=True, checksums=Checksums(4096))
tensorferry.write("x", {"a": tensor}.values())
tensorferry.write("x", "text")  # wrong
tensorferry.write("x", {"a": tensor})  # wrong
tensorferry.write("x", tensor, priority="urgent")  # wrong

tensorferry.write_many([("x", tensor), ("y", tensor, 5)])
tensorferry.read_many((Path(name), bytearray(3)) for name in "abc")
tensorferry.read_many([("x", "text")])  # wrong
tensorferry.write_many([tensor])  # wrong

assert_type(tensorferry.empty(3), torch.Tensor)
assert_type(tensorferry.empty((3, 4), dtype=torch.bfloat16), torch.Tensor)
assert_type(tensorferry.empty(3, numpy.float32), "numpy.typing.NDArray[numpy.float32]")
assert_type(tensorferry.empty(3, numpy.dtype(numpy.int8)), "numpy.typing.NDArray[numpy.int8]")
assert_type(tensorferry.empty([3], "float32"), "numpy.typing.NDArray[Any]")
tensorferry.empty("3")  # wrong
tensorferry.empty(3, 5)  # wrong

with tensorferry.open("x", "r+b") as file:
    assert_type(file, File)
    assert_type(file.read(tensor), torch.Tensor)
    assert_type(file.read_into(tensor), Future[torch.Tensor])
    assert_type(file.read_into(tensor).result(), torch.Tensor)
    assert_type(file.write_from([tensor], sync=True), "Future[list[torch.Tensor]]")
    file.write(tensor, 5)
    file.read_into("text")  # wrong
    file.write("text")  # wrong
tensorferry.open(["x", "y"])  # wrong


async def main() -> None:
    async with tensorferry.open("x") as opened:
        assert_type(opened, File)
        assert_type(await opened.read_into(bytearray(3)), bytearray)


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("typing") / "program.py"
    path.write_text(PROGRAM.lstrip())
    return path


def wrong_lines() -> list[int]:
    lines = PROGRAM.lstrip().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]


def test_mypy_knows_what_comes_back_and_what_is_refused(program: pathlib.Path) -> None:
    required.module("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", program]
    environment = {"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, f"--cache-dir={program.parent}"],
        cwd=program.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"program\.py:(\d+): error: ", done.stdout)
    assert sorted({int(line) for line in found}) == wrong_lines(), done.stdout + done.stderr


def test_pyright_knows_what_comes_back_and_what_is_refused(program: pathlib.Path) -> None:
    required.module("basedpyright")
    settings = {"include": ["program.py"], "extraPaths": [str(ROOT / "src")]}
    settings["typeCheckingMode"] = "standard"  # type: ignore[assignment]
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable],
        cwd=program.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each for each in found if each["severity"] == "error"]
    lines = sorted({each["range"]["start"]["line"] + 1 for each in errors})
    assert lines == wrong_lines(), [each["message"] for each in errors]
