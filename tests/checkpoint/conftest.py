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


@pytest.fixture
def unlogged() -> Iterator[None]:
    """No logging: pytest would keep all that torch logs."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
