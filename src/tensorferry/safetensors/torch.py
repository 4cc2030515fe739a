"""The functions of ``safetensors.torch``, under the same names."""

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
    """Load all tensors of a file, in the order of their offsets.

    Parameters
    ----------
    filename, device, backend, direct
        As for :class:`tensorferry.safetensors.safe_open`.

    Returns
    -------
    dict of str to torch.Tensor
        The tensors. The memory of each is freed with its last reference, independently of the others.

    Raises
    ------
    FileNotFoundError, SafetensorError, StorageError
        As for ``safe_open``.
    """
    with safe_open(filename, "pt", device, backend=backend, direct=direct) as file:
        return file.get_tensors()


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Load all tensors from a file's bytes. The tensors are copies, on the CPU.

    Raises
    ------
    SafetensorError
        The bytes break a rule of the format, or torch lacks a tensor's dtype.
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
    """Load a file's tensors into a model. Several parameters of the model may share one tensor.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Its tensors that are not in the file keep their values.
    filename, device, backend, direct
        As for :func:`load_file`.
    strict : bool
        Whether to raise RuntimeError if the file lacks names of the model, or has names that the model lacks.

    Returns
    -------
    missing : collection of str
        The names of the model that are not in the file.
    unexpected : collection of str
        The names in the file that are not in the model.

    Raises
    ------
    RuntimeError
        ``strict`` is true, and names are missing or unexpected.
    """
    state = load_file(filename, device, backend=backend, direct=direct)
    other_names = aliases(model.state_dict(), state)
    missing_names, unexpected = model.load_state_dict(state, strict=False)
    missing = set(missing_names)
    for name in other_names:
        # This name is an alias of a tensor that the file has under another name. A file must not have both.
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
    return missing, unexpected  # type: ignore[return-value]  # a set, as safetensors returns it
