"""Replacement of safetensors' functions with tensorferry's, for libraries that import safetensors.

``install()`` replaces names in the ``safetensors`` package, and in modules that have already imported them by name.
Calls for a framework that tensorferry does not support are passed on to safetensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from typing import Any

import _tensorferry_startup
from tensorferry.safetensors import opened
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import OTHERS

VARIABLE = "TENSORFERRY_SAFETENSORS"

# safetensors' modules. A module that is imported later is patched at that time. Only those names are replaced that the
# installed version of safetensors has.
_PACKAGE = "safetensors"
_MODULES = ("safetensors.torch", "safetensors.numpy")

_lock = threading.RLock()
# For each patched module, the callbacks that restore it.
_replaced: dict[str, contextlib.ExitStack] = {}


def install() -> None:
    """Make libraries that import ``safetensors`` load and save with tensorferry.

    This replaces ``safetensors.safe_open``, and the functions of ``safetensors.torch`` and ``safetensors.numpy`` that
    tensorferry has: in these modules, once they are imported, and in every module that has imported them by name.
    safetensors still serves frameworks other than torch and NumPy. tensorferry's ``SafetensorError`` becomes a subclass
    of safetensors' own. The environment variable TENSORFERRY_SAFETENSORS is set to 1, which installs tensorferry in
    child processes that start later, too. A second call has no effect.

    Raises
    ------
    ModuleNotFoundError
        safetensors is not installed.
    """
    try:
        theirs = importlib.import_module(_PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise ModuleNotFoundError(
            "safetensors is not installed (remedy: pip install safetensors)", name=_PACKAGE
        ) from None
    for name in _MODULES:
        # If another thread is importing the module, this waits until the module is complete. It must not wait while it
        # holds `_lock`, which the other thread may need to finish its import.
        if name in sys.modules:
            importlib.import_module(name)
    with _lock:
        if _PACKAGE not in _replaced:
            with contextlib.ExitStack() as stack:
                # Code that catches safetensors' SafetensorError must also catch tensorferry's.
                before = SafetensorError.__bases__
                SafetensorError.__bases__ = (theirs.SafetensorError,)
                stack.callback(setattr, SafetensorError, "__bases__", before)
                _replace(stack, {"safe_open": _with_fallback(theirs.safe_open)}, theirs)
                _set_variable(stack)
                _replaced[_PACKAGE] = stack.pop_all()
        for name in _MODULES:
            module = sys.modules.get(name)
            if name in _replaced:
                continue
            if module is None:
                _tensorferry_startup.arm(name)
                continue
            ours = importlib.import_module(f"tensorferry.{name}")
            with contextlib.ExitStack() as stack:
                _replace(stack, {each: _wrap(getattr(ours, each)) for each in ours.__all__}, module)
                _replaced[name] = stack.pop_all()


def uninstall() -> None:
    """Undo :func:`install`. Files that were opened in the meantime stay usable."""
    with _lock:
        for name in (_PACKAGE, *_MODULES):
            _tensorferry_startup.disarm(name)
        while _replaced:
            _replaced.popitem()[1].close()


def installed() -> bool:
    """Return whether :func:`install` is in effect."""
    return _PACKAGE in _replaced


def _with_fallback(theirs: Any) -> Any:
    """Return a subclass of tensorferry's ``safe_open`` that passes unsupported frameworks on to safetensors' own."""

    class safe_open(opened.safe_open):  # noqa: N801
        def __new__(cls, filename: Any, framework: Any, *arguments: Any, **options: Any) -> Any:
            if framework in OTHERS:
                return theirs(filename, framework, *arguments, **options)
            return super().__new__(cls)

    safe_open.__doc__ = opened.safe_open.__doc__
    safe_open.__module__, safe_open.__qualname__ = opened.__name__, "safe_open"
    return safe_open


def _replace(stack: contextlib.ExitStack, ours: dict[str, Any], module: Any) -> None:
    """Replace a module's functions with those of the same names in ``ours``, in every module that has imported them."""
    pairs = [(vars(module)[name], each) for name, each in ours.items() if name in vars(module)]
    # uninstall() searches all modules again, because modules may have imported the replacements in the meantime.
    stack.callback(_exchange, [(mine, theirs) for theirs, mine in pairs])
    _exchange(pairs)


def _exchange(pairs: list[tuple[Any, Any]]) -> None:
    """Replace the first object of each pair with the second in the namespaces of all modules."""
    known = {id(old): (old, new) for old, new in pairs}
    for holder in list(sys.modules.values()):
        names = getattr(holder, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in known and value is known[id(value)][0]:
                names[name] = known[id(value)][1]


def _wrap(function: Any) -> Any:
    """Wrap a function in a distinct object.

    uninstall() searches for objects by identity. It must not replace names that a program has imported from tensorferry
    itself. The wrapper is a partial object and not a nested function, because a nested function cannot be pickled.
    Programs may pickle safetensors' functions, for example to pass them to another process.
    """
    return functools.update_wrapper(functools.partial(function), function)


def _set_variable(stack: contextlib.ExitStack) -> None:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"

    def restore() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    stack.callback(restore)
