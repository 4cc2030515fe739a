"""Fixtures for the tests of stores."""

import pytest

from tensorferry.store import TensorStore
from tests.store.data import SEGMENT


@pytest.fixture
def store(tmp_path):
    """A store of several small segments."""
    with TensorStore(tmp_path / "store", segment_nbytes=SEGMENT) as store:
        yield store
