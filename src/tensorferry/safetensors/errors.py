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


LOOKED_AT_NBYTES = 512
"""Of a file's first bytes so many tell what else it is."""


def something_else(begin: bytes) -> str | None:
    """Return what a file is that is found under a model's name, where its first bytes say so."""
    if begin.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, which stands for the file that was not downloaded (remedy: git lfs pull)"
    text = begin[:LOOKED_AT_NBYTES].lstrip(b"\xef\xbb\xbf\t\n\r ").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<!--")):
        return "it is a web page: something else than the file was downloaded (is a login or another address needed?)"
    return None


_SHOWN = 100


def _rebuild(
    kind: type[SafetensorError], reason: str, path: str, name: str | None
) -> SafetensorError:
    return kind(reason, path, name=name)
