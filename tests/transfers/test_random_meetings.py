"""Submit, cancel, close, drop, fork and interrupt at random moments from 8 threads.

The test lasts 20 seconds, or TENSORFERRY_STRESS_SECONDS. TENSORFERRY_TEST_SEED determines the operations, but not their
times.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tests.support import child
from tests.support.data import SEED

if TYPE_CHECKING:
    import pathlib

SECONDS = float(os.environ.get("TENSORFERRY_STRESS_SECONDS") or 20)


@pytest.mark.timeout(SECONDS + 840)
def test_nothing_is_lost_where_threads_meet_at_random_moments(directory: pathlib.Path) -> None:
    engines = [name for name, refusal in tensorferry.engines().items() if refusal is None]
    ended = child.call(
        "tests.transfers.stress:run",
        timeout_s=SECONDS + 780,
        directory=directory,
        engines=engines,
        seconds=SECONDS,
        seed=SEED,
    )
    counts = ended.result["counts"]
    print(f"seed {SEED}: {counts}")
    for kind in ("writes", "reads", "closes", "writes cancelled", "forks", "interrupts"):
        assert counts.get(kind, 0) > 0, f"no {kind}: {counts}"
