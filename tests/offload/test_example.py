"""The example: a training that is killed for memory, and goes through with its optimizer's state on a drive."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.child import ROOT

pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path


def run(directory: Path, *arguments: str) -> str:
    # Not a warm interpreter: that works outside of the limit.
    program = ROOT / "examples" / "offload" / "train.py"
    done = subprocess.run(
        [sys.executable, program, f"--directory={directory}", "--steps=2", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(directory.iterdir()) == []
    return done.stdout


def test_example_trains_as_in_memory(directory: Path) -> None:
    told = run(directory, "--no-limit", "--parameters=4000000")
    assert "the same, bit for bit" in told


@pytest.mark.root
def test_example_trains_in_a_limit_that_kills_the_optimizer_in_memory(directory: Path) -> None:
    told = run(directory, "--parameters=24000000", "--reference")
    if "no memory limit" in told:
        pytest.skip("no cgroup can be made here")
    assert "AdamW in memory: killed for memory." in told
    assert "budget of 25 MiB: trained" in told
    assert "the same, bit for bit" in told


def generate(directory: Path, *arguments: str) -> str:
    program = ROOT / "examples" / "offload" / "generate.py"
    done = subprocess.run(
        [sys.executable, program, f"--directory={directory}", "--tokens=3", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(directory.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("kind", ["--built-in", "transformers"])
def test_streamed_model_generates_as_in_memory(directory: Path, kind: str) -> None:
    pytest.importorskip("safetensors")
    if kind == "transformers":
        pytest.importorskip("transformers")
    told = generate(directory, "--no-limit", "--parameters=8000000", *[kind][kind[0] != "-" :])
    assert "tokens are the same" in told


@pytest.mark.root
def test_streamed_model_generates_in_a_limit_that_kills_the_one_in_memory(directory: Path) -> None:
    pytest.importorskip("safetensors")
    told = generate(directory, "--built-in", "--parameters=60000000")
    if "no memory limit" in told:
        pytest.skip("no cgroup can be made here")
    assert "in memory: killed for memory." in told
    assert "tokens are the same" in told
