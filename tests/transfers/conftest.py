"""Fixtures for tests of transfers: a watchdog that ends the run after a hang, and helpers of test_meetings*.py."""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

import pytest

from tests.support import child, required, slow_calls

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 600
HANG_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End the run after a hang, and print the stack of every thread, even if no Python code can run."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S, method="thread"))


class Run(Protocol):
    """Calls a function of meetings.py on the engine, in a child that obeys slow_calls' rules; returns its result."""

    def __call__(self, program: Any, /, **arguments: Any) -> Any: ...


@pytest.fixture
def run(default_engine: str, tmp_path: pathlib.Path) -> Run:
    """A function that calls another in a child."""
    if refusal := slow_calls.why_unavailable():
        required.missing("tools", refusal)
    environment = slow_calls.SlowCalls(tmp_path / "slow-calls").environment()

    def call(program: Any, /, **arguments: Any) -> Any:
        return child.call(
            f"{program.__module__}:{program.__name__}",
            timeout_s=HANG_S,
            environment=environment,
            engine=default_engine,
            **arguments,
        ).result

    return call
