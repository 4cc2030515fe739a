"""Errors of checkpoints, which locate the problem by file, names and bytes."""

from __future__ import annotations

from tensorferry.base.reprs import first_of


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or invalid.

    Attributes
    ----------
    reason : str
        The problem. The message puts path and names before it, so "it" in the reason is the file or the entry.
    path : str
        The file with the problem.
    names : tuple of str
        The affected tensors or other entries, where they are known.
    begin, end : int or None
        The affected bytes of the file, ``end`` not included, where they are known.
    """

    def __init__(
        self,
        reason: str,
        path: str = "",
        *,
        names: tuple[str, ...] = (),
        begin: int | None = None,
        end: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.names = names
        self.begin = begin
        self.end = end

    def __str__(self) -> str:
        where = ""
        if self.begin is not None and self.end is not None:
            where += f"bytes {self.begin} to {self.end} of "
        if self.path:
            where += f"{self.path!r}"
        if self.names:
            where += f" ({first_of([*map(repr, self.names)], _SHOWN_NAMES)})"
        return f"{where}: {self.reason}" if where else self.reason


class RefusedCheckpointError(CheckpointError):
    """The bytes are undamaged, but their content is refused, such as an object that needs ``trust_pickle=True``."""


class NotACheckpointError(CheckpointError):
    """The file is not a checkpoint, so it cannot be verified."""


class MirrorError(RuntimeError):
    """A checkpoint could not be mirrored to a bucket, or the bucket's contents cannot be determined.

    The message names the bucket. If the store refused a request, it also has the request's key and HTTP status. The
    local checkpoint is complete.
    """


def cause_of(error: BaseException) -> BaseException:
    """Return the OSError that made torch.save fail, or ``error`` itself if there was none.

    After a failed write torch.save still closes the archive. That raises a second error, which hides the first one.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


_SHOWN_NAMES = 4
