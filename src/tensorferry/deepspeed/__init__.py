"""DeepSpeed on tensorferry: its NVMe offload, its fast checkpoint writer and its own tools run on this core.

>>> import tensorferry.deepspeed
>>> tensorferry.deepspeed.install()  # doctest: +SKIP

The same for programs that cannot be changed: ``python -m tensorferry.deepspeed script.py``, or the environment
variable TENSORFERRY_DEEPSPEED=1, which processes that are started later inherit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

__all__ = ["install", "installed", "uninstall"]

VARIABLE = "TENSORFERRY_DEEPSPEED"

_lock = threading.Lock()
_replaced: contextlib.ExitStack | None = None


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])


def install() -> None:
    """Have DeepSpeed's op builders load tensorferry's ops instead of compiling DeepSpeed's own.

    ``AsyncIOBuilder``, ``GDSBuilder``, ``PinMemoryBuilder`` and ``UtilsBuilder`` are changed in place, for whoever
    imported them before, too. Call it before DeepSpeed's own engine is loaded, best next to ``import deepspeed``.
    It sets TENSORFERRY_DEEPSPEED=1, so that processes started later do the same. A second call does nothing.

    Raises
    ------
    ModuleNotFoundError
        DeepSpeed is not installed.

    Warns
    -----
    RuntimeWarning
        DeepSpeed's own engine is in use already; handles made so far stay what they are.
    """
    global _replaced
    # DeepSpeed is large; only who asks for it waits for it. Imported before the lock is taken: where the variable is
    # set, the end of that import is a call of this function, perhaps in another thread.
    from tensorferry.deepnvme import builders

    builders.import_deepspeed()
    with _lock:
        if _replaced is not None:
            return
        with contextlib.ExitStack() as stack:
            builders.replace(stack)
            _set_variable(stack)
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


def _set_variable(stack: contextlib.ExitStack) -> None:
    before = os.environ.get(VARIABLE)

    def restore() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    os.environ[VARIABLE] = "1"
    stack.callback(restore)
