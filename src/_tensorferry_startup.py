"""Where TENSORFERRY_DEEPSPEED or TENSORFERRY_SAFETENSORS is set: that package is served as soon as it is imported.

tensorferry_startup.pth imports this when the interpreter starts, in every process that inherits such a variable. So it
stands beside the package, imports nothing of it, and does nothing until someone imports what is to be served.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds a module as the other finders do, and has its import end with ``install()`` of ours for its package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec)
        return spec

    def _extend(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        run = loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run(module)
            if not any(finder is self for finder in sys.meta_path):
                return  # disarmed meanwhile
            disarm(self.name)
            import importlib

            package = self.name.partition(".")[0]
            importlib.import_module(f"tensorferry.{package}").install()

        loader.exec_module = run_and_install  # type: ignore[method-assign]


def arm(name: str) -> None:
    """Have the next import of a module install tensorferry for its package; where it is imported, do nothing."""
    if name not in sys.modules and not any(_is_for(finder, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name))


def disarm(name: str) -> None:
    """Undo :func:`arm`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_for(finder, name)]


def _is_for(finder: object, name: str) -> bool:
    return isinstance(finder, _Finder) and finder.name == name
