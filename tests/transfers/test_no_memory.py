"""Allocations of the threads of the core fail, one at a time: all transfers end well, and the process goes on."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.support import required, slow_calls

SOURCE = pathlib.Path(slow_calls.__file__).with_name("failing_malloc.cpp")

CHILD = """
import ctypes, sys
import tensorferry
failing = ctypes.CDLL(sys.argv[2])
failing.not_yet.restype = ctypes.c_long
folder, data, number, passed = sys.argv[1], bytes(range(256)) * 20_000, 0, 0
while not passed:  # until there are fewer allocations than the number of the one that fails
    number += 1 + number // 10
    with tensorferry.open(f"{folder}/file", "w+", engine=sys.argv[3]) as file:
        failing.fail_at(ctypes.c_long(number))
        file.write_from(data, 3).result()
        found = bytearray(len(data))
        file.read_into(found, 3).result()
        assert found == data
        with file.stream(len(data)) as stream:
            for begin in range(0, len(data), 100_001):
                stream.append(data[begin : begin + 100_001])
        assert file.read(bytearray(len(data)), len(data)) == data
        passed = failing.not_yet()
        failing.fail_at(ctypes.c_long(0))
print(number)
"""


def test_an_allocation_of_the_cores_threads_may_fail(directory: pathlib.Path, engine: str) -> None:
    if refusal := slow_calls.why_unavailable():
        required.missing("tools", refusal)
    library = slow_calls.build(SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, directory, library, engine],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
