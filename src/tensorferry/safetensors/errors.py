"""What is wrong with a safetensors file, or with what was asked of it."""

from __future__ import annotations

from typing import Any


class Root(Exception):  # noqa: N818
    """What :func:`tensorferry.safetensors.install` puts safetensors' own error in the place of.

    Python exchanges bases only for those that are made alike, which ``Exception`` is not.
    """


class SafetensorError(Root):
    """A file breaks a rule of the format, or what was asked for cannot be had of it.

    Attributes
    ----------
    reason : str
        What is wrong.
    path : str
        The file; empty where there is none.
    name : str or None
        The tensor concerned, where there is one.
    """

    def __init__(self, reason: str, path: str = "", *, name: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.name = name

    def __str__(self) -> str:
        where = f"{self.path!r}: " if self.path else ""
        if self.name is not None:
            where += f"tensor {shortened(self.name)}: "
        return where + self.reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.reason, self.path, self.name)


def shortened(value: object) -> str:
    """Return a value of a file as messages show it: whoever made the file chose how long it is."""
    text = repr(value[:_SHOWN] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


_SHOWN = 100


def _rebuild(
    kind: type[SafetensorError], reason: str, path: str, name: str | None
) -> SafetensorError:
    return kind(reason, path, name=name)
