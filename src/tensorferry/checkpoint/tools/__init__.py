"""Inspection of checkpoints and files without loading them; a path without a file fails before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorferry.checkpoint.errors import NotACheckpointError
from tensorferry.checkpoint.tools.formats import SAFETENSORS, format_of
from tensorferry.transfer.remote import checked_text

if TYPE_CHECKING:
    from tensorferry.base.checks import Readable
    from tensorferry.checkpoint.progress import Listener
    from tensorferry.checkpoint.tools.findings import Entry, Report


def verify(
    path: Readable,
    *,
    trust_pickle: bool = False,
    write_checksums: bool = False,
    progress: Listener | None = None,
) -> Report:
    """Read a complete checkpoint, a file of :func:`save` or torch.save, or safetensors files, and verify all bytes.

    Parameters
    ----------
    path : str or PathLike, or pair of store and key
        The checkpoint's folder, or the file; for safetensors a file, a sharded model's index, or a folder with either.
        It may be in a bucket, in any form that :func:`tensorferry.open` accepts.
    trust_pickle : bool
        As for :class:`tensorferry.checkpoint.FileSystemReader`; code in a single file is never run.
    write_checksums : bool
        Write checksums next to safetensors files that have none; see :mod:`tensorferry.safetensors.checksums`.
    progress : function of a Progress, optional
        Called during the verification and at its end, with the bytes and files that are done, and the totals.

    Returns
    -------
    Report
        Damage is not raised, but listed in ``problems``. Data without a checksum are listed in ``unverified``.

    Raises
    ------
    FileNotFoundError
        The path does not exist, or is a folder without a checkpoint.
    CheckpointError
        The path is a file of another kind, or of torch.save before torch 1.6, which wrote no checksums; or
        ``write_checksums`` is set for another format than safetensors.
    OSError
        The path cannot be read.
    """
    text = checked_text(path)
    found = format_of(text)
    if write_checksums and found is not SAFETENSORS:
        raise NotACheckpointError(
            "write_checksums: only for safetensors files; files of this format have their own checksums",
            text,
        )
    report: Report = found.tools.verify(
        text, trust_pickle=trust_pickle, write_checksums=write_checksums, progress=progress
    )
    return report


def entries(path: Readable, *, trust_pickle: bool = False) -> list[Entry]:
    """Return the entries of a checkpoint, sorted by name, or the tensors of a single file, in the order of the file.

    Raises
    ------
    FileNotFoundError, OSError
        As for :func:`verify`.
    CheckpointError
        As for :func:`verify`; or the metadata are damaged, or hold objects that torch does not write.
    """
    text = checked_text(path)
    found: list[Entry] = format_of(text).tools.entries(text, trust_pickle=trust_pickle)
    return found
