"""Finds and runs the Python examples in the docs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import commands

if TYPE_CHECKING:
    import subprocess

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]

# Each is its place, page:line, and its code.
BLOCKS = [
    (f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match.group(1))
    for page in PAGES
    for text in [(ROOT / page).read_text()]
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]
_GPU = re.compile(r'"cuda|torch\.cuda|cupy')
ON_HOST = [(name, code) for name, code in BLOCKS if not _GPU.search(code)]
ON_GPU = [(name, code) for name, code in BLOCKS if _GPU.search(code)]
# The others would have nothing left to show.
REHEARSED = [
    (name, code.replace('"cuda"', '"cpu"'))
    for name, code in ON_GPU
    if not re.search(r"torch\.cuda|cupy|new_pinned_device_tensor", code)
]


def missing(code: str) -> str | None:
    """Return which module that code imports is not installed."""
    names = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


def run(code: str, directory: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run code in a given directory with a Python interpreter; its output is in stdout."""
    return commands.run(python, "-c", code, cwd=directory, timeout_s=300)
