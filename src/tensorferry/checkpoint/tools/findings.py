"""What `verify` and `ls` find, of checkpoints and of single files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorferry.checkpoint.progress import Meter

if TYPE_CHECKING:
    from tensorferry.checkpoint.errors import CheckpointError
    from tensorferry.checkpoint.progress import Listener


@dataclass
class Report:
    """What :func:`verify` found.

    Attributes
    ----------
    path : str
        The checkpoint, or the file.
    entries : int
        How many tensors and objects it has; of a single file of torch.save's: records.
    nbytes : int
        How many bytes were verified.
    problems : list of CheckpointError or OSError
        What is damaged, missing or unreadable; each names tensors, file and range where it can.
    unverified : list of str
        Names of what has no checksum to verify it by: tensors and objects, files of metadata, which torch's own
        writer never gives one, records of single files, and safetensors files.
    written : list of str
        The files of checksums that it has written, as it was asked to.
    """

    path: str
    entries: int = 0
    nbytes: int = 0
    problems: list[CheckpointError | OSError] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def require_sound(self) -> None:
        """Raise the first problem, if there is one."""
        if self.problems:
            raise self.problems[0]


class Audit:
    """A report in the making, and how far it has come; each format has a subclass that finds."""

    def __init__(self, path: str, progress: Listener | None) -> None:
        self.report = Report(path)
        self.meter = Meter(progress)

    def finish(self) -> Report:
        """Return the report, and say that all is done."""
        self.meter.finish()
        return self.report

    def problem(self, error: CheckpointError | OSError, path: str = "") -> None:
        """Keep what is wrong; one of the system's that names no file is of ``path``."""
        if isinstance(error, OSError):
            error.filename = error.filename or path or self.report.path
        self.report.problems.append(error)


@dataclass(frozen=True)
class Shard:
    """A stored part of a tensor, or all of it; or an object.

    Attributes
    ----------
    offsets, sizes : tuple of int
        Which part; both empty for objects.
    file : str or None
        The data file's name; None where the checkpoint does not say where it lies.
    begin, end : int
        Where in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Entry:
    """An entry of a checkpoint.

    Attributes
    ----------
    name : str
        What it is called in the state dict.
    dtype : str or None
        Such as "float32", or as safetensors have it where torch has no such elements; None for an object that is no
        tensor.
    shape : tuple of int
        Of the whole tensor.
    nbytes : int
        Of the whole tensor's elements, or of the pickled object.
    shards : tuple of Shard
        Its parts.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    shards: tuple[Shard, ...]
