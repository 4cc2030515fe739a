"""The examples in the docs run as they stand, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
MORE_PAGES = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "examples/file_access/README.md",
]
BLOCKS = [
    (f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match.group(1))
    for page in PAGES
    for text in [(ROOT / page).read_text()]
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("code", [code for _, code in BLOCKS], ids=[name for name, _ in BLOCKS])
def test_examples_run(code: str, directory: pathlib.Path) -> None:
    if "deepspeed" in code and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES])
def test_links_within_the_project_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, part in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        found = (ROOT / page).parent / target if target else ROOT / page
        assert found.exists(), target
        if part:
            assert part in anchors(found.read_text()), f"{target}#{part}"


def anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
