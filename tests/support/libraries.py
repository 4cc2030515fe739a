"""Broken installations of torch and DeepSpeed, for tests that do not need them and would wait for their imports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib

LEFT_OUT = "raise ImportError('left out')"


def broken(folder: pathlib.Path, program: str = LEFT_OUT) -> dict[str, str]:
    """Write modules that run `program` when imported, and return the environment in which they are found."""
    for name in ("torch", "deepspeed"):
        (folder / f"{name}.py").write_text(program)
    folder.chmod(0o755)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
