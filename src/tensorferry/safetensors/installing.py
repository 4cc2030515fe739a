"""Ours in the place of safetensors' own functions, for libraries that import these.

``install()`` puts our names into the ``safetensors`` package, and into modules that have imported them by name before.
What is asked for in a framework that we have not is passed on to safetensors itself.
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
from tensorferry.safetensors.frameworks import is_served

VARIABLE = "TENSORFERRY_SAFETENSORS"

# safetensors' modules; those that are imported later are replaced then. Of each, only names that are there already.
_PACKAGE = "safetensors"
_MODULES = ("safetensors.torch", "safetensors.numpy")

_lock = threading.RLock()
_replaced: dict[str, contextlib.ExitStack] = {}  # by module: the way back


def install() -> None:
    """Have libraries that import ``safetensors`` load and save by tensorferry.

    ``safetensors.safe_open``, and what ``safetensors.torch`` and ``safetensors.numpy`` have of ours, are replaced: in
    these modules, when they are imported, and wherever else they have been imported by name. Frameworks other than
    torch and NumPy stay with safetensors. Our ``SafetensorError`` becomes one of theirs. It sets
    TENSORFERRY_SAFETENSORS=1, so that processes started later do the same. A second call does nothing.

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
        if name in sys.modules:  # perhaps another thread is at it; never waited for with the lock
            importlib.import_module(name)
    with _lock:
        if _PACKAGE not in _replaced:
            with contextlib.ExitStack() as stack:
                # Who catches their error catches ours.
                before = SafetensorError.__bases__
                SafetensorError.__bases__ = (theirs.SafetensorError,)
                stack.callback(setattr, SafetensorError, "__bases__", before)
                _replace(stack, {"safe_open": _with_others(theirs.safe_open)}, theirs)
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
                _replace(
                    stack, {each: _of_its_own(getattr(ours, each)) for each in ours.__all__}, module
                )
                _replaced[name] = stack.pop_all()


def uninstall() -> None:
    """Undo :func:`install`. What has been opened meanwhile goes on working."""
    with _lock:
        for name in (_PACKAGE, *_MODULES):
            _tensorferry_startup.disarm(name)
        while _replaced:
            _replaced.popitem()[1].close()


def installed() -> bool:
    """Return whether ours are in safetensors' place."""
    return _PACKAGE in _replaced


def _with_others(theirs: Any) -> Any:
    """Return our ``safe_open``, as a class that passes on what we have no framework for."""

    class safe_open(opened.safe_open):  # noqa: N801
        def __new__(cls, filename: Any, framework: Any, *arguments: Any, **options: Any) -> Any:
            if not is_served(framework):
                return theirs(filename, framework, *arguments, **options)
            return super().__new__(cls)

    safe_open.__doc__ = opened.safe_open.__doc__
    safe_open.__module__, safe_open.__qualname__ = opened.__name__, "safe_open"
    return safe_open


def _replace(stack: contextlib.ExitStack, ours: dict[str, Any], module: Any) -> None:
    """Replace what a module of theirs has by the names of ours: there, and wherever it was imported to."""
    pairs = [(vars(module)[name], each) for name, each in ours.items() if name in vars(module)]
    # Also out of what was imported meanwhile.
    stack.callback(_exchange, [(mine, theirs) for theirs, mine in pairs])
    _exchange(pairs)


def _exchange(pairs: list[tuple[Any, Any]]) -> None:
    """Put the second of each pair wherever a module has the first."""
    known = {id(old): (old, new) for old, new in pairs}
    for holder in list(sys.modules.values()):
        names = getattr(holder, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in known and value is known[id(value)][0]:
                names[name] = known[id(value)][1]


def _of_its_own(function: Any) -> Any:
    """Return a function that is not the one that programs import from here, which uninstall() leaves alone."""

    @functools.wraps(function)
    def installed(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return installed


def _set_variable(stack: contextlib.ExitStack) -> None:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"

    def put_back() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    stack.callback(put_back)
