"""What looks at checkpoints and files without loading them; for a path where there is none, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorferry.checkpoint.errors import NotACheckpointError
from tensorferry.checkpoint.tools.formats import format_of
from tensorferry.transfer.remote import text_of

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
    """Read a whole checkpoint, a file that :func:`save` or torch.save has written, or safetensors files, and verify it.

    Parameters
    ----------
    path : str or PathLike, or pair of store and key
        The checkpoint's folder, or the file; of safetensors a file, a sharded model's index, or a folder with either.
        Also in a bucket, as :func:`tensorferry.open` has them.
    trust_pickle : bool
        As for :class:`tensorferry.checkpoint.FileSystemReader`; no code of a single file is ever run.
    write_checksums : bool
        Keep checksums beside safetensors files that have none; see :mod:`tensorferry.safetensors.checksums`.
    progress : function of a Progress, optional
        Called now and then, and at the end: bytes and files done, and in all.

    Returns
    -------
    Report
        Damage does not raise; it is in ``problems``. What has no checksum is in ``unverified``.

    Raises
    ------
    FileNotFoundError
        There is nothing, or a folder without a checkpoint.
    CheckpointError
        It is a file of another kind, or one of torch.save before torch 1.6, in which nothing can be verified; or
        checksums are to be written of what is no safetensors file.
    OSError
        It cannot be read.
    """
    text = text_of(path)
    found = format_of(text)
    if write_checksums and not found.keeps_checksums:
        raise NotACheckpointError("it is no safetensors file: it has checksums of its own", text)
    return found.tools.verify(
        text, trust_pickle=trust_pickle, write_checksums=write_checksums, progress=progress
    )


def entries(path: Readable, *, trust_pickle: bool = False) -> list[Entry]:
    """Return what is in a checkpoint, by name, or the tensors of files of torch.save's or safetensors, in their order.

    Raises
    ------
    FileNotFoundError, OSError
        As for :func:`verify`.
    CheckpointError
        As for :func:`verify`, or what says what there is is damaged, or holds what torch does not put there.
    """
    text = text_of(path)
    return format_of(text).tools.entries(text, trust_pickle=trust_pickle)
