"""The tests that need a GPU pass on the stand-in driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import standin, suites

if TYPE_CHECKING:
    import pathlib

# torch cannot make CUDA tensors on the stand-in driver.
SUITES = ["tests/gpu", "tests/standin/driver", "--ignore=tests/gpu/test_torch_cuda.py"]
TIMEOUT_S = 1500


@pytest.mark.minutes
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_suite_passes(tmp_path: pathlib.Path) -> None:
    suites.assert_passes(
        [*SUITES, "--timeout", "180"],
        tmp_path,
        timeout_s=TIMEOUT_S,
        # Torch must not find a real GPU in a process in which the core uses the stand-in driver.
        environment=standin.environment() | {"CUDA_VISIBLE_DEVICES": ""},
        share=1,  # they run nowhere else
        at_least=480,  # of 512, where all three engines are there
    )
