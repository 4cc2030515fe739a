"""What `import tensorferry` costs in a fresh interpreter, which must not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.harness import (
    Comparison,
    Contender,
    Figure,
    MeasurementError,
    Outcome,
    Sample,
    Settings,
    compare,
    difference,
)

ROUNDS_MIN = 15
BARE = "bare interpreter"
OURS = "import tensorferry"
_CHECK = "import sys, tensorferry; sys.exit('torch' in sys.modules)"


def run(settings: Settings) -> Outcome:
    _run(_CHECK)
    contenders = [
        Contender(BARE, "peer", lambda number: _time("pass")),
        Contender(OURS, "ours", lambda number: _time("import tensorferry")),
        Contender("import numpy", "peer", lambda number: _time("import numpy")),
    ]
    comparison = Comparison(
        "import", "whole process, files in the page cache", "ms", higher_is_better=False
    )
    rounds = 2 if settings.smoke else max(ROUNDS_MIN, settings.rounds)
    compare(settings, comparison, contenders, rounds=rounds)
    ours, bare = comparison.row(OURS), comparison.row(BARE)
    over = difference(ours, bare)
    note = f"bare interpreter {bare.median:.0f} ms" if bare else ""
    return Outcome(
        [comparison], [Figure("import tensorferry, without torch", "<=", 60, over, "ms", note)]
    )


def _time(code: str) -> Sample:
    start = time.perf_counter()
    _run(code)
    seconds = time.perf_counter() - start
    return Sample(seconds * 1000, seconds)


def _run(code: str) -> None:
    # compiled modules may be kept, as on any machine where the package was imported before
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise MeasurementError(words[-1] if words else "importing tensorferry imports torch")
