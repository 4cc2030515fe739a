"""The examples run without changes, and leave no files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import interrupted
from tests.support import required

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"

pytest.importorskip("torch")
required.module("rich")


def test_demo_moves_tensors_every_way_and_cleans_up(tmp_path: Path) -> None:
    figures = tmp_path.parent / f"{tmp_path.name}.json"
    arguments = [f"--directory={tmp_path}", "--nbytes=3000017", "--small-count=24"]
    done = subprocess.run(
        [sys.executable, DEMO, *arguments, f"--json={figures}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every byte was checked." in done.stdout
    rows = json.loads(figures.read_text())["rows"]
    ways = {row["way"] for row in rows}
    assert ways == {"plain Python", "tensorferry.aio_handle", "tensorferry.write/read"}
    works = {row["work"] for row in rows}
    assert works == {"store large", "load large", "store small", "load small"}
    assert len(rows) == len(ways) * len(works)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_removes_its_files(tmp_path: Path, number: signal.Signals) -> None:
    arguments = [f"--directory={tmp_path}", "--nbytes=200000000", "--small-count=1000"]
    command = [sys.executable, DEMO, *arguments]
    assert interrupted.returncode(command, tmp_path, number) == 130
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_larger_than_its_memory_and_leaves_nothing(tmp_path: Path) -> None:
    cache = DEMO.with_name("store") / "cache.py"
    arguments = ["--tensors=60", "--nbytes=100000", "--memory-nbytes=1000000", "--requests=30"]
    done = subprocess.run(
        [sys.executable, cache, f"--directory={tmp_path}", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 MB of tensors, 1 MB of memory" in done.stdout
    assert "6 MB on the drive" in done.stdout
    assert list(tmp_path.iterdir()) == []
