"""Allocations fail, one at a time: the call raises MemoryError or succeeds, and everything else goes on."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.support import required, slow_calls

SOURCE = pathlib.Path(slow_calls.__file__).with_name("failing_malloc.cpp")

CORES_THREADS = """
import ctypes, sys
import tensorferry
failing = ctypes.CDLL(sys.argv[2])
failing.not_yet.restype = ctypes.c_long
folder, data, number, passed = sys.argv[1], bytes(range(256)) * 20_000, 0, 0
while not passed:  # until there are fewer allocations than the number of the one that fails
    number += 1 + number // 10
    with tensorferry.open(f"{folder}/file", "w+", engine=sys.argv[3]) as file:
        failing.fail_at(ctypes.c_long(number), 0)
        file.write_from(data, 3).result()
        found = bytearray(len(data))
        file.read_into(found, 3).result()
        assert found == data
        with file.stream(len(data)) as stream:
            for begin in range(0, len(data), 100_001):
                stream.append(data[begin : begin + 100_001])
        assert file.read(bytearray(len(data)), len(data)) == data
        passed = failing.not_yet()
        failing.fail_at(ctypes.c_long(0), 0)
print(number)
"""

CALLER = """
import ctypes, pathlib, sys
import numpy as np
import tensorferry
from tensorferry.transfer.runtime import default_scheduler
failing = ctypes.CDLL(sys.argv[2])
failing.not_yet.restype = ctypes.c_long
folder = sys.argv[1]
data = bytes(range(256)) * 600
pieces = [data[begin : begin + 7001] for begin in range(0, len(data), 7001)]
file = tensorferry.open(f"{folder}/file", "w+")
file.write(data)

def begins():
    return range(0, len(data), 7001)

def many():
    parts = [(f"{folder}/many{at % 7}", piece, at // 7 * 7001) for at, piece in enumerate(pieces)]
    tensorferry.write_many(parts, truncate=True)
    for path, piece, begin in parts:
        with open(path, "rb") as written:
            written.seek(begin)
            assert written.read(len(piece)) == piece

def reads():
    found = [bytearray(piece) for piece in pieces]
    for one in found:
        one[:] = bytes(len(one))
    tensorferry.read_many([(file.path, one, begin) for one, begin in zip(found, begins())])
    assert b"".join(found) == data
    sums = tensorferry.Checksums(4096, segments=True)
    assert b"".join(file.read(found, checksums=sums)) == data
    assert tensorferry.read(file.path, bytearray(len(data))) == data

def futures():
    written = [file.write_from(piece, begin) for piece, begin in zip(pieces, begins())]
    read = file.read_into([bytearray(10), bytearray(20)])
    for future in written:
        future.result()
    assert b"".join(read.result()) == data[:30]

def streams():
    with file.stream(4096, checksums=tensorferry.Checksums(8192, segments=True)) as stream:
        stream.append(data)
        for piece in pieces:
            stream.append(piece)
        file.write(b"HEAD", 5000)  # after these bytes
        stream.append(pieces)
    expected = bytearray(3 * data)
    expected[904:908] = b"HEAD"
    assert file.read(bytearray(3 * len(data)), 4096) == expected
    file.write(data)

def opened():
    path = f"{folder}/opened"
    with tensorferry.open(path, "w+") as other:
        other.write(data)
        other.truncate(1000)
    assert pathlib.Path(path).read_bytes() == data[:1000]

def fail_each(call):
    number = passed = 0
    while not passed:
        number += 1
        failing.fail_at(ctypes.c_long(number), 1)
        try:
            call()
        except MemoryError:
            pass
        except RuntimeError as error:
            assert str(error).startswith("can't allocate"), error  # a lock of Python's own
        passed = failing.not_yet()
        failing.fail_at(ctypes.c_long(0), 1)
    return number

for call in many, reads, futures, streams, opened:
    call()
    print(call.__name__, fail_each(call))
    call()
kept = []
for at in range(1200):  # so many that tables of them grow
    array = (bytearray, np.empty)[at % 2](8)
    fail_each(lambda: kept.append(file.read_into(array)))
    assert bytes(kept[-1].result())[:8] == data[:8]
file.close()
assert default_scheduler().wait_for_progress(0) and default_scheduler().outstanding() == 0
"""


def run(program: str, directory: pathlib.Path, *arguments: str) -> list[str]:
    if refusal := slow_calls.why_unavailable():
        required.missing("tools", refusal)
    library = slow_calls.build(SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", program, directory, library, *arguments],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_allocation_of_the_cores_threads_may_fail(directory: pathlib.Path, engine: str) -> None:
    assert int(run(CORES_THREADS, directory, engine)[0]) > 3


def test_an_allocation_of_the_callers_thread_may_fail(directory: pathlib.Path) -> None:
    counts = run(CALLER, directory)[1::2]
    assert len(counts) == 5
    assert all(int(count) > 10 for count in counts), counts
