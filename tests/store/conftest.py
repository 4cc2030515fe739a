"""Fixtures for the tests of stores."""

import pytest

from tensorferry.store import TensorStore


@pytest.fixture
def store(tmp_path):
    with TensorStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def named(tmp_path):
    with TensorStore(tmp_path / "named", temporary=False) as store:
        yield store
