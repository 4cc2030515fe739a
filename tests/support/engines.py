"""Which engines a test meets, where not each of them."""

from __future__ import annotations

import pytest

# For what is over, or refused, before any engine has a part in it.
one_engine = pytest.mark.parametrize("engine", ["threads"], indirect=True)
