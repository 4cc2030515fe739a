"""The tests that need a GPU pass on the stand-in driver, with every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conftest import ENGINES
from tests.support import standin, suites

if TYPE_CHECKING:
    import pathlib

# torch cannot make CUDA tensors on the stand-in driver.
SUITES = ["tests/gpu", "tests/standin/driver", "--ignore=tests/gpu/test_torch_cuda.py"]
TIMEOUT_S = 1500


@pytest.mark.minutes
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_suite_passes(engine: str, tmp_path: pathlib.Path) -> None:
    first = engine == ENGINES[0]
    chosen = [] if first else ["-m", "engine"]  # the others once
    # Torch must not find a real GPU in a process in which the core uses the stand-in driver.
    environment = standin.environment() | {"TENSORFERRY_ENGINE": engine, "CUDA_VISIBLE_DEVICES": ""}
    suites.assert_passes(
        [*SUITES, *chosen, "--timeout", "180"],
        tmp_path,
        timeout_s=TIMEOUT_S,
        environment=environment,
        at_least=230 if first else 115,  # of 256, and of 127 and 132
        share=1 if first else 0.25,
    )
