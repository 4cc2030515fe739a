"""What objects say that they are."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def once_made(show: Callable[[_T], str]) -> Callable[[_T], str]:
    """Make a ``__repr__`` that is any object's where the constructor raised: a traceback may show such, half made."""

    @functools.wraps(show)
    def shown(self: _T) -> str:
        try:
            return show(self)
        except AttributeError:
            return object.__repr__(self)

    return shown
