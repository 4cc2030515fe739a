"""Robust ``__repr__`` methods, and lists of names in messages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")


def safe_repr(show: Callable[[_T], str]) -> Callable[[_T], str]:
    """Decorate a ``__repr__`` to fall back to ``object.__repr__`` for an object that is not fully initialized.

    A traceback may show such an object after its constructor has raised.
    """

    @functools.wraps(show)
    def wrapper(self: _T) -> str:
        try:
            return show(self)
        except AttributeError:
            return object.__repr__(self)

    return wrapper


def first_of(texts: Sequence[str], count: int, between: str = ", ") -> str:
    """Return the first ``count`` texts, with ``between`` between them, and how many more there are."""
    more = len(texts) - count
    return between.join(texts[:count]) + (f" and {more} more" if more > 0 else "")
