"""Programs that are interrupted in the middle of their work."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from pathlib import Path


def returncode(command: Sequence[str | Path], directory: Path, number: signal.Signals) -> int:
    """Start a program, send it a signal once its scratch folder has a file, and return its exit status."""
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while not any(directory.glob("*/*")):
            assert program.poll() is None, program.stdout.read() if program.stdout else ""
            assert time.monotonic() < deadline
            time.sleep(0.02)
        program.send_signal(number)
        print(program.communicate(timeout=300)[0])
    finally:
        program.kill()
        program.wait()
    return program.returncode
