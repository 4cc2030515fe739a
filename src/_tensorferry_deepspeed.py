"""Where TENSORFERRY_DEEPSPEED is set: DeepSpeed is served by tensorferry as soon as it has been imported.

tensorferry_deepspeed.pth imports this when the interpreter starts, in every process that inherits the variable.
So it stands beside the package, imports nothing of it, and does nothing until someone imports DeepSpeed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds DeepSpeed as the other finders do, and has its import end with ``tensorferry.deepspeed.install()``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed":
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
            disarm()
            from tensorferry.deepspeed import install

            install()

        loader.exec_module = run_and_install  # type: ignore[method-assign]


def arm() -> None:
    """Have the next import of DeepSpeed install tensorferry; where it is imported already, do nothing."""
    if "deepspeed" not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def disarm() -> None:
    """Undo :func:`arm`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
