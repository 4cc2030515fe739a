"""Selects the engines of a test that does not need all of them."""

from __future__ import annotations

import pytest

# For operations that end, or are refused, before an engine takes part.
one_engine = pytest.mark.parametrize("engine", ["threads"], indirect=True)
