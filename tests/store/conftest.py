"""Fixtures for the tests of stores."""

import pytest

from tensorferry.store import TensorStore, segments
from tests.store.data import LARGE


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Tensors need fewer bytes to have files of their own, which saves time. test_life.py tests the real limit."""
    monkeypatch.setattr(segments, "LARGE_NBYTES", LARGE)


@pytest.fixture
def store(tmp_path):
    with TensorStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def named(tmp_path):
    with TensorStore(tmp_path / "named", temporary=False) as store:
        yield store
