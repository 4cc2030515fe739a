"""Fixtures for the tests of checkpoints."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# All of this needs torch, which the project's tests can do without.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


# Warnings of torch about its own internals.
_WARNINGS = (
    *("ignore:.*:UserWarning:torch", "ignore:torch.distributed is disabled"),
    *("ignore:Detected an existing", "ignore:ComplexHalf", "ignore:torch.quantize"),
)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings(*_WARNINGS))


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Turn logging off, because pytest would keep all of torch's log records."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
