"""DeepSpeed on tensorferry: its NVMe offload, its fast checkpoint writer and its own tools use tensorferry's core.

>>> import tensorferry.deepspeed
>>> tensorferry.deepspeed.install()  # doctest: +SKIP

For programs that cannot be changed, use ``python -m tensorferry.deepspeed script.py`` or set the environment variable
TENSORFERRY_DEEPSPEED=1, which child processes inherit.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["install", "installed", "uninstall"]

VARIABLE = "TENSORFERRY_DEEPSPEED"
CHECKPOINTS_VARIABLE = "TENSORFERRY_DEEPSPEED_CHECKPOINTS"

_lock = threading.Lock()
_restore_stack: contextlib.ExitStack | None = None


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])


def install(*, checkpoints: bool | None = None) -> None:
    """Make DeepSpeed load tensorferry's ops instead of compiling its own, and save checkpoints with tensorferry.

    ``AsyncIOBuilder``, ``GDSBuilder``, ``PinMemoryBuilder`` and ``UtilsBuilder`` are changed in place, so modules that
    have imported them already use tensorferry, too. Call this function before DeepSpeed loads its own ops (async_io,
    gds, pin_memory), preferably directly after ``import deepspeed``. It sets TENSORFERRY_DEEPSPEED=1, which installs
    tensorferry into DeepSpeed also in processes that are started later. A second call does nothing.

    Parameters
    ----------
    checkpoints : bool, optional
        Whether ``engine.save_checkpoint`` and ``load_checkpoint`` write and read their files with tensorferry: durable
        and verified, and ``latest`` is written only when the files of all ranks are complete. The default is True,
        unless the environment variable TENSORFERRY_DEEPSPEED_CHECKPOINTS is 0. This function sets the variable, for
        processes that are started later.

    Raises
    ------
    ValueError
        TENSORFERRY_DEEPSPEED_CHECKPOINTS is neither 0 nor 1.
    ModuleNotFoundError
        DeepSpeed is not installed.

    Warns
    -----
    RuntimeWarning
        DeepSpeed has already loaded its own ops, and existing handles keep using them. Or DeepSpeed is too old, and
        saves its checkpoints itself.
    """
    global _restore_stack
    # DeepSpeed is large, so it is imported only here. The import must be outside of the lock: with
    # TENSORFERRY_DEEPSPEED=1 the import hook of _tensorferry_startup calls install() at the end of the import, possibly
    # in another thread, and that call would wait forever for the lock.
    from tensorferry.deepnvme import builders

    if checkpoints is None:
        value = os.environ.get(CHECKPOINTS_VARIABLE) or "1"
        if value not in ("0", "1"):
            raise ValueError(f"{CHECKPOINTS_VARIABLE}: {value!r} is neither 0 nor 1")
        checkpoints = value == "1"
    builders.import_deepspeed()
    hooks = _checkpoint_hooks() if checkpoints else None
    with _lock:
        if _restore_stack is not None:
            return
        with contextlib.ExitStack() as stack:
            builders.replace(stack)
            if hooks is not None:
                hooks.replace(stack)
            _set_variable(stack, VARIABLE, "1")
            _set_variable(stack, CHECKPOINTS_VARIABLE, str(int(checkpoints)))
            _restore_stack = stack.pop_all()


def uninstall() -> None:
    """Undo :func:`install`: DeepSpeed loads its own ops, and saves checkpoints itself, again.

    Existing handles continue to work.
    """
    global _restore_stack
    startup = sys.modules.get("_tensorferry_startup")
    with _lock:
        if startup is not None:
            startup.disarm("deepspeed")
        replaced, _restore_stack = _restore_stack, None
        if replaced is not None:
            replaced.close()


def installed() -> bool:
    """Return whether tensorferry is installed into DeepSpeed in this process."""
    return _restore_stack is not None


def _checkpoint_hooks() -> ModuleType | None:
    try:
        return importlib.import_module("tensorferry.deepspeed.checkpoints")
    except ImportError as error:
        if not (error.name or "").startswith("deepspeed"):
            raise
        warnings.warn(
            f"tensorferry does not support the checkpoint engines of this DeepSpeed version ({error}): DeepSpeed's "
            "own code saves and loads checkpoints",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _set_variable(stack: contextlib.ExitStack, name: str, value: str) -> None:
    before = os.environ.get(name)

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    os.environ[name] = value
    stack.callback(restore)
