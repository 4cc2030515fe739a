"""The examples in the docs run without changes, and links have targets.

Examples for GPUs need one. On machines without a GPU, those that can run with tensors on the CPU do so, which tests all
but their use of CUDA.
"""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from tools import api_page, throughput_picture

import tensorferry
from tensorferry.tuning import gpus
from tests.support import required, snippets, warm
from tests.support.snippets import PAGES

ROOT = pathlib.Path(__file__).parents[2]
# PyPI shows README.md without the files next to it.
REPOSITORY = re.compile(
    r"https://(?:github\.com/tensorferry/tensorferry/blob|raw\.githubusercontent\.com/tensorferry/tensorferry)"
    r"(?:/refs/heads)?/main/"
)
MORE_PAGES = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "examples/file_access/README.md",
]


def named(blocks: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "code", [code for _, code in blocks], ids=[name for name, _ in blocks]
    )


@named(snippets.ON_HOST)
def test_examples_run(code: str, directory: pathlib.Path) -> None:
    run_example(code, directory)


@pytest.mark.gpu
@named(snippets.ON_GPU)
def test_gpu_examples_run(code: str, directory: pathlib.Path) -> None:
    if reason := gpus.gpu_refusal():
        pytest.skip(reason)
    if "new_pinned_device_tensor" in code and (reason := gpus.gds_refusal()):
        pytest.skip(reason)
    run_example(code, directory)


@named(snippets.REHEARSED)
def test_gpu_examples_run_with_tensors_of_the_cpu(code: str, directory: pathlib.Path) -> None:
    run_example(code, directory)


@named(snippets.ON_GPU)
def test_gpu_examples_are_python(code: str) -> None:
    compile(code, "example", "exec")


def run_example(code: str, directory: pathlib.Path) -> None:
    if name := snippets.missing(code):
        required.missing(name, f"{name} is not installed")  # DeepSpeed may be required
    run = snippets.run(code, directory, warm.python("torch"))
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES])
def test_links_within_the_project_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in REPOSITORY.split(text)[1:]:
        assert (ROOT / re.split(r"[)#\s]", target)[0]).exists(), target
    for target, part in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        found = (ROOT / page).parent / target if target else ROOT / page
        assert found.exists(), target
        if part:
            assert part in anchors(found.read_text()), f"{target}#{part}"


def anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_and_the_index_lead_to_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    assert all(
        page in (ROOT / "README.md").read_text() for page in ("docs/index.md", "docs/api.md")
    )
    for page in PAGES[1:]:
        name = page.removeprefix("docs/")
        assert name == "index.md" or f"]({name})" in index, page


def test_the_site_is_built_and_no_link_is_broken(tmp_path: pathlib.Path) -> None:
    required.module("mkdocs")
    required.module("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        tmp_path,
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "reference/tensorferry.html").read_text()
    for name in tensorferry.__all__:
        assert f'id="tensorferry.{name}"' in page, name


@pytest.mark.parametrize("name", ["checkpoint", "safetensors", "store", "offload", "npy"])
def test_the_reference_has_a_place_for_every_public_name(name: str) -> None:
    pytest.importorskip("torch")
    page = (ROOT / f"docs/reference/{name}.md").read_text()
    module = importlib.import_module(f"tensorferry.{name}")
    named = set(re.findall(rf"^::: tensorferry\.{name}\.(\w+)$", page, re.MULTILINE))
    assert named == set(module.__all__)


def test_the_picture_shows_the_figures_of_the_table() -> None:
    page = (ROOT / "docs/measured.md").read_text()
    shown = throughput_picture.PICTURE.read_text()
    for figures in throughput_picture.panels(page).values():
        assert len(figures) == 5
        for label, speed in figures.items():
            assert f">{label}<" in shown
            assert f">{speed:.2f}<" in shown


def test_the_api_page_has_all_that_docstrings_say() -> None:
    """Remedy: ``python -m tools.api_page``."""
    pytest.importorskip("torch")
    text = api_page.PAGE.read_text()
    assert api_page.page(text) == text
    for package in ("checkpoint", "safetensors", "store", "offload", "deepspeed"):
        assert f"<!-- names of tensorferry.{package} -->" in text
