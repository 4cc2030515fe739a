"""Shared code of the examples in this folder: processes with a memory limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(arguments: list[str], group: Path | None = None) -> dict[str, Any]:
    """Run a Python program, in a cgroup if one is given, and return the JSON in its last line, or {"killed": True}."""

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=join)
    if group is not None and done.returncode == -signal.SIGKILL:
        return {"killed": True}
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # libraries print, too
    return result


def run_kind(
    program: str,
    kind: str,
    directory: Path,
    budget_nbytes: int,
    options: list[str],
    group: Path | None = None,
) -> dict[str, Any]:
    """Run a program with ``--kind``, which selects one of the variants that it compares. See :func:`run`."""
    own = [f"--kind={kind}", f"--budget-nbytes={budget_nbytes}", f"--directory={directory}"]
    return run([program, *own, *options], group)


def print_training(label: str, result: dict[str, Any]) -> None:
    """Print the result of a training."""
    if "killed" in result:
        print(f"{label}: killed for memory.")
    elif "message" in result:
        print(f"{label}: {result['message']}.")
    else:
        first, last = result["losses"][0], result["losses"][-1]
        peak = result["peak_nbytes"] / (1 << 20)
        print(f"{label}: trained, loss {first:.4f} to {last:.4f}, {peak:.0f} MiB at most.")


def memory_nbytes() -> int:
    """Return the anonymous memory of this process. The files of its libraries are not counted."""
    status = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in status if line.startswith("RssAnon:"))
    return int(found.split()[1]) * 1024


@contextlib.contextmanager
def memory_limit(nbytes: int | None) -> Iterator[Path | None]:
    """Yield a cgroup of either version with a memory limit, or None if it cannot be created."""
    group: Path | None = None
    with contextlib.suppress(OSError):
        if nbytes is not None:
            group = _new_group(nbytes)
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


def _new_group(nbytes: int) -> Path:
    first = Path("/sys/fs/cgroup/memory")
    top = first if first.is_dir() else Path("/sys/fs/cgroup")
    group = top / f"tensorferry-example-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if top == first else "memory.max"
        (group / name).write_text(str(nbytes))
        # Forbid swap, too. Version 1 limits the sum of memory and swap, version 2 swap alone.
        swap = group / ("memory.memsw.limit_in_bytes" if top == first else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(nbytes if top == first else 0))
    except OSError:
        group.rmdir()
        raise
    return group
