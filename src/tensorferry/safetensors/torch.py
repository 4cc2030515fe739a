"""``safetensors.torch``, by the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.memory import arrays_of
from tensorferry.safetensors.opened import safe_open
from tensorferry.safetensors.saving import aliases, save, save_file, save_model

if TYPE_CHECKING:
    import os

    import torch

    from tensorferry.base.checks import Readable

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


def load_file(
    filename: Readable,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    direct: str = "auto",
) -> dict[str, torch.Tensor]:
    """Load all tensors of a file, in the order of their bytes.

    Parameters
    ----------
    filename, device, backend, direct
        As for :class:`tensorferry.safetensors.safe_open`.

    Returns
    -------
    dict of str to torch.Tensor
        Each one's memory is free again with its last reference, whatever becomes of the others.

    Raises
    ------
    FileNotFoundError, SafetensorError, StorageError
        As for ``safe_open``.
    """
    with safe_open(filename, "pt", device, backend=backend, direct=direct) as file:
        return file.get_tensors()


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Load all tensors of a file's bytes; they are copies, on the CPU.

    Raises
    ------
    SafetensorError
        The bytes break a rule of the format, or torch has no such dtype.
    """
    return arrays_of(data, framework_of("pt", "cpu"))


def load_model(
    model: torch.nn.Module,
    filename: str | bytes | os.PathLike[str],
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    direct: str = "auto",
) -> tuple[list[str], list[str]]:
    """Load a file's tensors into a model, of which several parameters may be one tensor.

    Parameters
    ----------
    model : torch.nn.Module
        What is not in the file stays as it is.
    filename, device, backend, direct
        As for :func:`load_file`.
    strict : bool
        Whether to raise where names are missing in the file, or unexpected there.

    Returns
    -------
    missing, unexpected : collections of str
        Of the model and not in the file; of the file and not in the model.

    Raises
    ------
    RuntimeError
        ``strict`` was given, and there are such names.
    """
    state = load_file(filename, device, backend=backend, direct=direct)
    other_names = aliases(model.state_dict(), state)
    missing_names, unexpected = model.load_state_dict(state, strict=False)
    missing = set(missing_names)
    for name in other_names:
        # The file has another name of the same tensor; it should have no two.
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"    {what} key(s) in state_dict: {quoted}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected  # type: ignore[return-value]  # a set, as safetensors has it
