"""Our writer and reader in the place of torch's, for programs and libraries that do not let one choose.

``dcp.save(state, checkpoint_id=path)`` takes torch's own FileSystemWriter; Lightning saves like that, and accelerate
(Transformers' Trainer) takes it by its name in ``torch.distributed.checkpoint``. Both find ours after :func:`install`.

``dcp.async_save`` asks for a writer only once it has staged the state by other means, or in another process, that knows
nothing of :func:`install`; so it is given ours from the beginning.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

from torch.distributed.checkpoint import filesystem, state_dict_saver

from tensorferry.base.checks import kept_path
from tensorferry.checkpoint.staging import Stager
from tensorferry.checkpoint.storage.reader import FileSystemReader
from tensorferry.checkpoint.storage.writer import FileSystemWriter

_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint._storage_utils")
_HUGGING_FACE_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.hf_storage")
_SAVER_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver")

_torchs_async_save: Any = state_dict_saver.async_save
_defaults: dict[Any, dict[str, Any]] = {}  # of keyword arguments, by class
# Of all asynchronous saves that name only a folder: the memory for the copy is kept from one to the next.
_stager: Stager | None = None


def install(**reading: Any) -> None:
    """Have torch.distributed.checkpoint use our writer and reader by default. Calling it again changes ``reading``.

    Parameters
    ----------
    **reading
        Keyword arguments of :class:`FileSystemReader`, as ``trust_pickle``, ``verify``, ``broadcast`` and ``progress``,
        for readers that are not given them: Lightning, accelerate and others make readers by themselves.
        :class:`HuggingFaceStorageReader` has those of them that it knows.

    Raises
    ------
    TypeError
        There is no such argument.
    ValueError
        It has no such value.

    Modules that have imported torch's classes, or ``async_save``, by name before keep these. Writers and readers that
    are given to ``dcp.save`` and ``dcp.load`` are used as before.

    Notes
    -----
    Asynchronous saves that name only a folder share a :class:`Stager`, which keeps its memory until :func:`uninstall`.
    """
    FileSystemReader("", **reading)  # which refuses what is wrong
    _set_defaults(reading)
    with contextlib.suppress(ImportError):
        ours = _hugging_face()
        _put_hugging_face(ours.HuggingFaceStorageWriter, ours.HuggingFaceStorageReader)
    _put(FileSystemWriter, FileSystemReader, _async_save)


def uninstall() -> None:
    """Put torch's own classes back."""
    global _stager
    _set_defaults({})
    _put(filesystem.FileSystemWriter, filesystem.FileSystemReader, _torchs_async_save)
    with contextlib.suppress(ImportError):
        ours = _hugging_face()
        _put_hugging_face(ours.TorchsWriter, ours.TorchsReader)
    if _stager is not None:
        _stager.close()
        _stager = None


def installed() -> bool:
    """Return whether ours are the default."""
    module: Any = importlib.import_module(_PLACES[0])
    return module.FileSystemWriter is FileSystemWriter


@functools.wraps(_torchs_async_save)
def _async_save(*arguments: Any, **options: Any) -> Any:
    folder = options.get("checkpoint_id")
    if folder and FileSystemWriter.validate_checkpoint_id(folder):
        folder = options["checkpoint_id"] = kept_path(folder, "checkpoint_id")
    if (
        options.get("storage_writer") is None
        and folder
        and FileSystemWriter.validate_checkpoint_id(folder)
    ):
        global _stager
        _stager = _stager or Stager()
        writer = options["storage_writer"] = FileSystemWriter(folder)
        writer._stager = _stager
    return _torchs_async_save(*arguments, **options)


def _hugging_face() -> Any:
    """Return the module of ours; ImportError before torch 2.7 has one."""
    # Its classes derive from what they find at its import, and are to go on with torch's.
    return importlib.import_module("tensorferry.checkpoint.storage.huggingface")


def _put_hugging_face(writer: Any, reader: Any) -> None:
    for name in _HUGGING_FACE_PLACES:
        module: Any = importlib.import_module(name)
        if hasattr(module, "HuggingFaceStorageWriter"):
            module.HuggingFaceStorageWriter, module.HuggingFaceStorageReader = writer, reader


def _set_defaults(reading: dict[str, Any]) -> None:
    """Let keyword arguments have other defaults, which help() and inspect show."""
    kinds: list[Any] = [FileSystemReader]
    with contextlib.suppress(ImportError):
        kinds.append(_hugging_face().HuggingFaceStorageReader)
    for kind in kinds:
        own = _defaults.setdefault(kind, dict(kind.__init__.__kwdefaults__))
        known = {name: value for name, value in reading.items() if name in own}
        kind.__init__.__kwdefaults__ = own | known
    FileSystemWriter._warns_of_refusals = not reading.get("trust_pickle", False)


def _put(writer: Any, reader: Any, async_save: Any) -> None:
    for name in _PLACES:
        module: Any = importlib.import_module(name)
        module.FileSystemWriter, module.FileSystemReader = writer, reader
    for name in _SAVER_PLACES:
        module = importlib.import_module(name)
        module.async_save = async_save
