"""Fixtures for the tests of checkpoints."""

from __future__ import annotations

import importlib.util
import logging
import zlib
from typing import TYPE_CHECKING

import pytest

from tests.support.data import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

# All of this needs torch, which the project's tests can do without.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """What torch draws depends on the session's seed and the test's name alone."""
    import torch

    torch.manual_seed(SEED + zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def unlogged() -> Iterator[None]:
    """No logging: pytest would keep all that torch logs."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
