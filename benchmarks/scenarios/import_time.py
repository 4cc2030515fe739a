"""What `import tensorferry` costs in a fresh interpreter, which must not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.bench import contenders, scenario
from benchmarks.harness import MeasurementError, Sample

if TYPE_CHECKING:
    from benchmarks.bench import Bench

ROUNDS_MIN = 15
BARE = "bare interpreter"
OURS = "import tensorferry"
_CHECK = "import sys, tensorferry; sys.exit('torch' in sys.modules)"


@scenario
def run(bench: Bench) -> None:
    _run(_CHECK)
    others = {BARE: lambda _: _time("pass"), "import numpy": lambda _: _time("import numpy")}
    ours = {OURS: lambda _: _time("import tensorferry")}
    comparison = bench.compare(
        "import",
        "whole process, files in the page cache",
        contenders("peer", others) + contenders("ours", ours),
        "ms",
        rounds=2 if bench.smoke else max(ROUNDS_MIN, bench.settings.rounds),
    )
    bare = comparison.row(BARE)
    over = comparison.above(OURS, bare)
    note = f"bare interpreter {bare.median:.0f} ms" if bare else ""
    bench.at_most("import tensorferry, without torch", 60, over, note, "ms")


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
