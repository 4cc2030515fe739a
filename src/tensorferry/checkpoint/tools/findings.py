"""Results of `verify` and `ls` for checkpoints and single files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter

if TYPE_CHECKING:
    from tensorferry.checkpoint.progress import Listener, Progress


@dataclass
class Report:
    """The result of :func:`verify`.

    Attributes
    ----------
    path : str
        The checkpoint, or the file.
    entries : int
        The number of tensors and objects; for a file of torch.save the number of records.
    nbytes : int
        The number of verified bytes.
    problems : list of CheckpointError or OSError
        Damaged, missing or unreadable data; each error has the tensors, file and range where they are known.
    unverified : list of str
        The names of data without a checksum: tensors and objects, metadata files of torch's own writer, records of
        single files, and safetensors files.
    written : list of str
        The files of checksums that ``write_checksums`` has created.
    """

    path: str
    entries: int = 0
    nbytes: int = 0
    problems: list[CheckpointError | OSError] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def require_sound(self) -> None:
        """Raise the first problem, if there is any."""
        if self.problems:
            raise self.problems[0]


class Audit:
    """Collects a report, and measures progress. The formats have subclasses that do the checks."""

    def __init__(self, path: str, progress: Listener | None) -> None:
        self.report = Report(path)
        self.meter = Meter(self._listen if progress else None)
        self._progress = progress
        self._listener_error: Exception | None = None

    def finish(self) -> Report:
        """Report the end of the work, and return the report."""
        self.meter.finish()
        return self.report

    def problem(self, error: Exception, path: str = "") -> None:
        """Add an error to the report as a problem; ``path`` is the file for an error that names none.

        An error that the progress function has raised is not a problem of the checkpoint, and is raised again. An error
        of another type than CheckpointError and OSError comes from damage that no check has foreseen: it is reported as
        a CheckpointError.
        """
        if error is self._listener_error:
            raise error
        path = path or self.report.path
        if isinstance(error, OSError):
            error.filename = error.filename or path
        elif not isinstance(error, CheckpointError):
            error = CheckpointError(f"it cannot be read ({type(error).__name__}: {error})", path)
        self.report.problems.append(error)

    def _listen(self, progress: Progress) -> None:
        assert self._progress is not None
        try:
            self._progress(progress)
        except Exception as error:
            # problem() recognizes this error by its identity, and raises it rather than report it.
            self._listener_error = error
            raise


@dataclass(frozen=True)
class Shard:
    """A stored part of a tensor, a complete tensor, or an object.

    Attributes
    ----------
    offsets, sizes : tuple of int
        The part of the tensor; both are empty for objects.
    file : str or None
        The data file's name; None if the checkpoint has no location for it.
    begin, end : int
        The byte range in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Entry:
    """A tensor or object of a checkpoint.

    Attributes
    ----------
    name : str
        Its name in the state dict.
    dtype : str or None
        For example "float32", or safetensors' name where torch has no such dtype; None for an object that is not a
        tensor.
    shape : tuple of int
        The size of the complete tensor.
    nbytes : int
        The bytes of the complete tensor, or of the pickled object.
    shards : tuple of Shard
        Its parts.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    shards: tuple[Shard, ...]
