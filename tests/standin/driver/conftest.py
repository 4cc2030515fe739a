"""Fixtures for tests that order faults of the stand-in driver."""

from __future__ import annotations

import gc
import pathlib
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import gpu, prepare  # noqa: F401 - pytest looks for the fixture here
from tests.support import standin

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    prepare(items, pathlib.Path(__file__).parent)


@pytest.fixture
def driver() -> Iterator[standin.StandIn]:
    """Return the stand-in driver, without orders and counts of earlier tests."""
    if not standin.chosen():
        pytest.skip("TENSORFERRY_LIBCUDA does not name the stand-in driver")
    control = standin.loaded()
    gc.collect()
    control.reset()
    yield control
    control.reset()
