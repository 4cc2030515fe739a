"""The examples in the docs run as they stand."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ["README.md", "docs/guide.md"]
BLOCKS = [
    (f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match.group(1))
    for page in PAGES
    for text in [(ROOT / page).read_text()]
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("code", [code for _, code in BLOCKS], ids=[name for name, _ in BLOCKS])
def test_examples_run(code: str, directory: pathlib.Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/guide.md", "docs/api.md"]
)
def test_links_within_the_project_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
