"""DeepSpeed on tensorferry: its NVMe offload, its fast checkpoint writer and its own tools run on this core.

>>> import tensorferry.deepspeed
>>> tensorferry.deepspeed.install()  # doctest: +SKIP

The same for programs that cannot be changed: ``python -m tensorferry.deepspeed script.py``, or the environment
variable TENSORFERRY_DEEPSPEED=1, which processes that are started later inherit.
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
_replaced: contextlib.ExitStack | None = None


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])


def install(*, checkpoints: bool | None = None) -> None:
    """Have DeepSpeed's op builders load tensorferry's ops instead of compiling its own, and checkpoints saved by us.

    ``AsyncIOBuilder``, ``GDSBuilder``, ``PinMemoryBuilder`` and ``UtilsBuilder`` are changed in place, for whoever
    imported them before, too. Call it before DeepSpeed's own engine is loaded, best next to ``import deepspeed``.
    It sets TENSORFERRY_DEEPSPEED=1, so that processes started later do the same. A second call does nothing.

    Parameters
    ----------
    checkpoints : bool, optional
        Whether ``engine.save_checkpoint`` and ``load_checkpoint`` write and read their files by us: durable, verified,
        with ``latest`` only when the files of all ranks are whole. By default they do, unless the environment has
        TENSORFERRY_DEEPSPEED_CHECKPOINTS=0; it is set for processes that are started later.

    Raises
    ------
    ValueError
        The variable is neither 0 nor 1.
    ModuleNotFoundError
        DeepSpeed is not installed.

    Warns
    -----
    RuntimeWarning
        DeepSpeed's own engine is in use already; handles made so far stay what they are. Or DeepSpeed is too old for
        its checkpoints to be ours.
    """
    global _replaced
    # DeepSpeed is large; only who asks for it waits for it. Imported before the lock is taken: where the variable is
    # set, the end of that import is a call of this function, perhaps in another thread.
    from tensorferry.deepnvme import builders

    if checkpoints is None:
        value = os.environ.get(CHECKPOINTS_VARIABLE) or "1"
        if value not in ("0", "1"):
            raise ValueError(f"{CHECKPOINTS_VARIABLE}: {value!r} is neither 0 nor 1")
        checkpoints = value == "1"
    builders.import_deepspeed()
    hooks = _checkpoint_hooks() if checkpoints else None
    with _lock:
        if _replaced is not None:
            return
        with contextlib.ExitStack() as stack:
            builders.replace(stack)
            if hooks is not None:
                hooks.replace(stack)
            _set_variable(stack, VARIABLE, "1")
            _set_variable(stack, CHECKPOINTS_VARIABLE, str(int(checkpoints)))
            _replaced = stack.pop_all()


def uninstall() -> None:
    """Undo :func:`install`: builders load DeepSpeed's own ops again. Handles made meanwhile go on working."""
    global _replaced
    startup = sys.modules.get("_tensorferry_startup")
    with _lock:
        if startup is not None:
            startup.disarm("deepspeed")
        replaced, _replaced = _replaced, None
        if replaced is not None:
            replaced.close()


def installed() -> bool:
    """Return whether tensorferry serves DeepSpeed in this process."""
    return _replaced is not None


def _checkpoint_hooks() -> ModuleType | None:
    try:
        return importlib.import_module("tensorferry.deepspeed.checkpoints")
    except ImportError as error:
        if not (error.name or "").startswith("deepspeed"):
            raise
        warnings.warn(
            f"this DeepSpeed has other checkpoint engines ({error}): it saves its checkpoints by itself",
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
