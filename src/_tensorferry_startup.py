"""Import hooks that install tensorferry into DeepSpeed or safetensors as soon as a program imports them.

If TENSORFERRY_DEEPSPEED or TENSORFERRY_SAFETENSORS is set, tensorferry_startup.pth imports this module when the
interpreter starts, in every process that inherits the variable. Many of these processes do not use tensorferry.
Therefore this module is outside of the package and imports nothing from it until DeepSpeed or safetensors is imported.
The package also uses :func:`arm` for other modules.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """A meta path finder that delegates to the other finders, and calls a function after a module's import."""

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
            self._wrap_loader(spec)
        return spec

    def _wrap_loader(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            if any(
                finder is self for finder in sys.meta_path
            ):  # unless disarm() was called during the import
                disarm(self.name)
                self._then()

        loader.exec_module = run_and_call  # type: ignore[method-assign]


def arm(name: str, then: Callable[[], object] | None = None) -> None:
    """Call ``then`` after the next import of a module; do nothing if the module is imported already.

    By default ``then`` calls ``install()`` of tensorferry's subpackage for the module's package.
    """

    def install() -> None:
        import importlib

        package = name.partition(".")[0]
        importlib.import_module(f"tensorferry.{package}").install()

    if name not in sys.modules and not any(_is_for(finder, name) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then or install))


def disarm(name: str) -> None:
    """Remove the hook of :func:`arm` for a module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_for(finder, name)]


def _is_for(finder: object, name: str) -> bool:
    return isinstance(finder, _Finder) and finder.name == name
