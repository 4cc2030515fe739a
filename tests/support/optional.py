"""Optional components: a test that uses one is skipped if the component is missing."""

from __future__ import annotations

from typing import Any

import pytest


class _Torch:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks up some of these in every object of a module
            raise AttributeError(name)
        return getattr(pytest.importorskip("torch"), name)


torch: Any = _Torch()
