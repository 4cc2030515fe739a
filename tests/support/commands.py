"""Runs commands and captures their output."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def run(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; its stdout and stderr are together in stdout."""
    return subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def on_terminal(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    streams: Sequence[str] = ("stdout",),
) -> bytes:
    """Run a command with these streams on a terminal; it must succeed. Return the terminal's output."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=env, cwd=cwd, **dict.fromkeys(streams, theirs)) as process:  # type: ignore[call-overload]
        os.close(theirs)
        output = b""
        with contextlib.suppress(OSError):  # Linux reports EIO when the other end is closed
            while part := os.read(ours, 65536):
                output += part
    os.close(ours)
    assert process.returncode == 0, output
    return output
