"""Writes the tables of docs/api.md from the packages' docstrings: ``python -m tools.api_page``.

tests/project/test_docs.py compares the page with the output of this program, so no exported name can be missing.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_MARKED = re.compile(r"(<!-- names of (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def page(text: str) -> str:
    """Return the page with new tables."""
    return _MARKED.sub(lambda found: found[1] + "\n" + table(found[2]) + "\n" + found[3], text)


def table(package: str) -> str:
    """Return the rows for the exported names of a package, sorted: functions and classes first, exceptions last."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    names.sort(key=lambda name: (_is_error(getattr(module, name)), name.lower()))
    rows = [f"| {_cells(name, getattr(module, name))} |\n" for name in names]
    return f"| in `{package}` | |\n|---|---|\n" + "".join(rows)


def _cells(name: str, thing: Any) -> str:
    docstring = inspect.getdoc(thing) or ""
    first = docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    first = re.sub(r":\w+:`[~.]?(\w[\w.]*)`", r"`\1`", first).replace("``", "`")
    if inspect.isclass(thing):
        methods = [
            method
            for method, value in inspect.getmembers(thing)
            if not method.startswith("_") and _is_documented(value) and not _is_error(thing)
        ]
        if methods:
            first += " " + ", ".join(f"`{method}`" for method in methods)
    # Users do not call the constructors of objects that a function creates.
    is_made_by_function = re.search(r"\b(made|created) by\b", first) is not None
    signature = "" if is_made_by_function else _signature(thing)
    return f"`{name}{signature}` | {first}"


def _is_documented(value: Any) -> bool:
    """Return whether a value is a method or property that tensorferry defines, with a docstring."""
    function = value.fget if isinstance(value, property) else value
    return getattr(function, "__module__", "").startswith("tensorferry") and bool(value.__doc__)


def _is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Exception)


def _signature(thing: Any) -> str:
    if _is_error(thing) or not callable(thing):
        return ""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return ""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(inspect.Signature(parameters)).replace("|", "\\|")
    return re.sub(r"<[^<>]*>", "...", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
