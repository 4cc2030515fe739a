"""A hang of what moves tensors ends the run; what meetings have in common."""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

import pytest

from tests.support import child, required, slow_calls

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 600
HANG_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A hang ends the run with every thread's stack, also where no Python code runs any more."""
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
