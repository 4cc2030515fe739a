"""The functions of ``safetensors.numpy``, under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.safetensors import saving
from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.memory import arrays_of
from tensorferry.safetensors.opened import safe_open

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from tensorferry.base.checks import Path, Readable

__all__ = ["load", "load_file", "save", "save_file"]


def load_file(
    filename: Readable,
    *,
    backend: str = "mmap",
    direct: str = "auto",
) -> dict[str, np.ndarray[Any, Any]]:
    """Load all tensors of a file, in the order of their offsets.

    Parameters
    ----------
    filename, backend, direct
        As for :class:`tensorferry.safetensors.safe_open`.

    Returns
    -------
    dict of str to numpy.ndarray
        The arrays. The memory of each is freed with its last reference, independently of the others.

    Raises
    ------
    FileNotFoundError, SafetensorError, StorageError
        As for ``safe_open``. SafetensorError also if NumPy lacks a tensor's dtype (bfloat16, float8).
    """
    with safe_open(filename, "np", backend=backend, direct=direct) as file:
        return file.get_tensors()


def load(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Load all tensors from a file's bytes. The arrays are copies.

    Raises
    ------
    SafetensorError
        The bytes break a rule of the format, or NumPy lacks a tensor's dtype.
    """
    return arrays_of(data, framework_of("np", "cpu"))


def save_file(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
) -> None:
    """Save arrays to a file. See :func:`tensorferry.safetensors.saving.save_file`."""
    saving.save_file(tensor_dict, filename, metadata, sync=sync)


def save(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a file with these arrays. See :func:`tensorferry.safetensors.saving.save`."""
    return saving.save(tensor_dict, metadata)
