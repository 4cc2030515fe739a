"""The number of system calls of a transfer; on a network file system each one is a message to a server."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from tests.support import required

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import os, sys
import numpy as np
import tensorferry

directory, small = sys.argv[1], np.ones(64 << 10, np.uint8)
large = np.ones((256 << 20) + 64, np.uint8)[64:]
calls = {
    "write": lambda: tensorferry.write(f"{directory}/small", small),
    "write a new file": lambda: tensorferry.write(f"{directory}/new", small),
    "read": lambda: tensorferry.read(f"{directory}/small", small),
    "read a lot": lambda: tensorferry.read(f"{directory}/large", large),
}
with open(f"{directory}/large", "wb") as file:
    file.truncate(large.nbytes)
for name, call in calls.items():
    call()  # what is made once in the life of a process
    for _ in range(1 if name == "read a lot" else 5):
        if "new" in name:
            os.unlink(f"{directory}/new")
        os.access(f"begin {name}", os.F_OK)
        call()
        os.access("end", os.F_OK)
"""


@pytest.fixture(scope="module")
def calls_made(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Return the system calls of the calling thread, and those of all threads, for each kind of transfer.

    Of several tries the one with the fewest calls: a thread that waits for another one's lock calls the kernel, too.
    """
    strace = required.command("strace")
    directory = tmp_path_factory.mktemp("traced")
    log = directory / "log"
    command = [strace, "-f", "-o", str(log), sys.executable, "-c", PROGRAM, str(directory)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    if ended.returncode != 0 and "ptrace" in ended.stderr:
        required.missing("tools", f"strace cannot trace here: {ended.stderr}")
    assert ended.returncode == 0, ended.stderr
    tries: dict[str, list[tuple[Counter[str], Counter[str]]]] = {}
    now: tuple[Counter[str], Counter[str]] | None = None
    main = ""
    for line in log.read_text(errors="replace").splitlines():
        thread, _, call = line.partition(" ")
        call = call.lstrip()
        main = main or thread
        if call.startswith("<...") or "(" not in call:
            continue
        name = call.partition("(")[0]
        if name in ("access", "faccessat", "faccessat2") and '"begin ' in call:
            now = Counter(), Counter()
            tries.setdefault(call.partition('"begin ')[2].partition('"')[0], []).append(now)
        elif name in ("access", "faccessat", "faccessat2") and '"end"' in call:
            now = None
        elif now is not None:
            now[0][name] += thread == main
            now[1][name] += 1
    return {kind: min(every, key=lambda one: one[0].total()) for kind, every in tries.items()}


@pytest.mark.parametrize(("kind", "most"), [("write", 8), ("write a new file", 8), ("read", 6)])
def test_a_small_transfer_by_path_makes_few_system_calls(
    calls_made: dict[str, tuple[Counter[str], Counter[str]]], kind: str, most: int
) -> None:
    made = calls_made[kind][0]
    kernel = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    if kernel < (6, 8):  # on older kernels each transfer has to query the type of the file system
        del made["fstatfs"]
    assert made["close"] == 1
    assert made.total() <= most, made


def test_memory_that_has_pages_is_looked_at_64_mib_at_a_time(
    calls_made: dict[str, tuple[Counter[str], Counter[str]]],
) -> None:
    made = calls_made["read a lot"][1]
    assert made["openat"] == 1
    assert made["mincore"] <= 5, made
    assert made["madvise"] == 0, made
