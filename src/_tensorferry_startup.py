"""Where TENSORFERRY_DEEPSPEED or TENSORFERRY_SAFETENSORS is set: that package is served as soon as it is imported.

tensorferry_startup.pth imports this when the interpreter starts, in every process that inherits such a variable. So it
stands beside the package, imports nothing of it, and does nothing until someone imports what is to be served. The
package arms it for others, too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds a module as the other finders do, and has its import end with a call."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name = name
        self._then = then

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

        def run_and_call(module: ModuleType) -> None:
            run(module)
            if any(finder is self for finder in sys.meta_path):  # it was not disarmed meanwhile
                disarm(self.name)
                self._then()

        loader.exec_module = run_and_call  # type: ignore[method-assign]


def arm(name: str, then: Callable[[], object] | None = None) -> None:
    """Have the next import of a module end with a call; where it is imported, do nothing.

    By default tensorferry is installed for the module's package.
    """

    def install() -> None:
        import importlib

        package = name.partition(".")[0]
        importlib.import_module(f"tensorferry.{package}").install()

    if name not in sys.modules and not any(_is_for(finder, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then or install))


def disarm(name: str) -> None:
    """Undo :func:`arm`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_for(finder, name)]


def _is_for(finder: object, name: str) -> bool:
    return isinstance(finder, _Finder) and finder.name == name
