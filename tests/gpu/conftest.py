"""Fixtures for tests that need a GPU: the GPUs themselves."""

from __future__ import annotations

import gc
import pathlib
from typing import TYPE_CHECKING

import pytest

from tests.support import gpus

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    prepare(items, pathlib.Path(__file__).parent)


def prepare(items: list[pytest.Item], folder: pathlib.Path) -> None:
    """Mark the tests of folder."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def gpu() -> Iterator[gpus.Gpu]:
    """The GPUs to test with; see tests/support/gpus.py."""
    chosen = gpus.chosen()
    if isinstance(chosen, str):
        pytest.skip(chosen)
    yield chosen
    gc.collect()
    for device in range(chosen.count):
        chosen.synchronize(device)
