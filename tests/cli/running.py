"""Commands as people and scripts run them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support import warm
from tests.support.child import ROOT

if TYPE_CHECKING:
    from pathlib import Path

BENCH = [sys.executable, "-m", "tensorferry", "bench"]


def ended(
    *command: object, expect: int = 0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without input, and fail unless it ends as expected."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `tensorferry` with these arguments."""
    return ended(warm.python(), "-m", "tensorferry", *arguments, **options)


def run_fresh(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it in an interpreter that has imported nothing, as what it starts has not."""
    return ended(sys.executable, "-m", "tensorferry", *arguments, **options)


def bench(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return run("bench", *arguments, **options)
