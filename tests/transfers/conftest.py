"""A hang of what moves tensors ends the run."""

from __future__ import annotations

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang ends the run with every thread's stack, also where no Python code runs any more."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S, method="thread"))
