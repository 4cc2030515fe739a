"""What tests can do without: one that uses it is skipped where it is missing."""

from __future__ import annotations

from typing import Any

import pytest


class _Torch:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for some of these in all that a module has
            raise AttributeError(name)
        return getattr(pytest.importorskip("torch"), name)


torch: Any = _Torch()
