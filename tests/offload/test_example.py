"""The examples: trainings and models that run out of memory, and succeed with their state or weights on a drive."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import commands, required, warm
from tests.support.child import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run(name: str, directory: Path, *arguments: str) -> str:
    # A warm interpreter works outside of the limit.
    python = warm.python() if "--no-limit" in arguments else sys.executable
    program = ROOT / "examples" / "offload" / name
    done = commands.run(python, program, f"--directory={directory}", *arguments)
    assert done.returncode == 0, done.stdout
    assert list(directory.iterdir()) == []
    if "no memory limit" in done.stdout and "--no-limit" not in arguments:
        required.missing("mounts", "no cgroup can be made here")
    return done.stdout


def test_example_trains_as_in_memory(directory: Path) -> None:
    told = run("train.py", directory, "--steps=2", "--no-limit", "--parameters=4000000")
    assert "the same, bit for bit" in told


@pytest.mark.root
def test_example_trains_in_a_limit_that_kills_the_optimizer_in_memory(directory: Path) -> None:
    told = run("train.py", directory, "--steps=2", "--parameters=24000000", "--reference")
    assert "AdamW in memory: killed for memory." in told
    assert "budget of 25 MiB: trained" in told
    assert "the same, bit for bit" in told


@pytest.mark.parametrize("kind", [["--built-in"], []], ids=["built-in", "transformers"])
def test_streamed_model_generates_as_in_memory(directory: Path, kind: list[str]) -> None:
    if not kind:
        required.module("transformers")
    options = ["--tokens=3", "--no-limit", "--parameters=8000000"]
    told = run("generate.py", directory, *options, *kind)
    assert "tokens are the same" in told


@pytest.mark.root
def test_streamed_model_generates_in_a_limit_that_kills_the_one_in_memory(directory: Path) -> None:
    told = run("generate.py", directory, "--tokens=3", "--built-in", "--parameters=60000000")
    assert "in memory: killed for memory." in told
    assert "tokens are the same" in told


@pytest.mark.root
def test_larger_model_trains_in_a_limit_that_kills_it_in_memory(directory: Path) -> None:
    told = run("train_larger.py", directory, "--steps=1", "--parameters=24M", "--reference")
    assert "torch alone: killed for memory." in told
    assert re.search(
        r"accelerate(: killed for memory| is not installed|: .* have no gradient)", told
    )
    assert "budget of 48 MiB: trained" in told
    assert "the same, bit for bit" in told


def test_llama_is_fine_tuned_as_in_memory(directory: Path) -> None:
    required.module("peft")
    told = run("finetune.py", directory, "--steps=2", "--layers=2", "--lora")
    assert "Losses and saved weights are the same, bit for bit." in told
