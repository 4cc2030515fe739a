"""Allocations of the threads of the core fail, one at a time: all transfers end well, and the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support import required

if TYPE_CHECKING:
    import pathlib

SOURCE = """
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
extern void* __libc_malloc(size_t);
static long left;
void fail_at(long number) { __atomic_store_n(&left, number, __ATOMIC_SEQ_CST); }
long not_yet(void) { return __atomic_load_n(&left, __ATOMIC_SEQ_CST); }
void* malloc(size_t nbytes) {
  char name[16] = "";
  if (__atomic_load_n(&left, __ATOMIC_SEQ_CST) > 0 &&
      pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "tensorferry", 11) == 0 &&
      __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST) == 0) {
    errno = ENOMEM;
    return 0;
  }
  return __libc_malloc(nbytes);
}
"""

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
    source, library = directory / "failing.c", directory / "failing.so"
    source.write_text(SOURCE)
    flags = ["-D_GNU_SOURCE", "-shared", "-fPIC", "-O1"]
    command = [required.command("cc"), *flags, "-o", library, source]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, directory, library, engine],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
