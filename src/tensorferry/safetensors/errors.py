"""Errors in safetensors files and in requests for their tensors."""

from __future__ import annotations


class ReplaceableBase(Exception):  # noqa: N818
    """A base class that :func:`tensorferry.safetensors.install` replaces with safetensors' own SafetensorError.

    ``SafetensorError`` cannot derive from ``Exception`` directly. CPython refuses an assignment to ``__bases__`` if the
    deallocators of the old and the new base differ. That of ``Exception``, a static type of the interpreter, differs
    from that of safetensors' class, which is created at run time. This class is created at run time, too, so it can be
    replaced.
    """


class SafetensorError(ReplaceableBase):
    """A file breaks a rule of the format, or does not contain or allow what was requested.

    Attributes
    ----------
    reason : str
        The problem.
    path : str
        The path of the file; empty if no file is concerned.
    name : str or None
        The name of the tensor, if one is concerned.
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


def shortened(value: object) -> str:
    """Return the repr of a value for a message, cut to a limited length: values in untrusted files can be huge."""
    text = repr(value[:_SHOWN] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


SNIFFED_NBYTES = 512
"""The number of first bytes by which :func:`wrong_download` recognizes a file."""


def wrong_download(begin: bytes) -> str | None:
    """Describe what a failed download has left instead of a file, judged by the first bytes, or return None."""
    if begin.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer: the file itself was not downloaded (remedy: git lfs pull)"
    text = begin[:SNIFFED_NBYTES].lstrip(b"\xef\xbb\xbf\t\n\r ").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<!--")):
        return "it is a web page that was downloaded instead of the file (is a login or another address needed?)"
    return None


_SHOWN = 100
