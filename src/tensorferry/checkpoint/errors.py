"""What is wrong with a checkpoint, as an exception that says where."""

from __future__ import annotations

from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or not what it says it is.

    Attributes
    ----------
    reason : str
        What is wrong.
    path : str
        The file in which it is wrong.
    names : tuple of str
        The tensors (or other entries) concerned, where that is known.
    begin, end : int or None
        The bytes of the file concerned, where that is known: from ``begin`` up to, not including, ``end``.
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
            shown = ", ".join(map(repr, self.names[:_SHOWN_NAMES]))
            more = len(self.names) - _SHOWN_NAMES
            where += f" ({shown}{f' and {more} more' if more > 0 else ''})"
        return f"{where}: {self.reason}" if where else self.reason

    def __reduce__(self) -> tuple[Any, ...]:
        # Other ranks are told of it by pickle.
        return _rebuild, (type(self), self.reason, self.path, self.names, self.begin, self.end)


class RefusedCheckpointError(CheckpointError):
    """The bytes are those that were written, but they hold something that is not read without trust: no damage."""


class NotACheckpointError(CheckpointError):
    """What is there is something else, of which nothing can be said here."""


class MirrorError(RuntimeError):
    """A checkpoint is not in the bucket where it was to be mirrored, or what is there cannot be told.

    The message names the bucket, and key and status where the store has refused something. The local one is whole.
    """


def cause_of(error: BaseException) -> BaseException:
    """Return what the system refused: torch.save, told of it, fails once more as it closes the archive."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


_SHOWN_NAMES = 4


def _rebuild(
    kind: type[CheckpointError],
    reason: str,
    path: str,
    names: tuple[str, ...],
    begin: int | None,
    end: int | None,
) -> CheckpointError:
    return kind(reason, path, names=names, begin=begin, end=end)
