"""Every benchmark scenario runs, at sizes too small for its numbers to mean anything."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "--rounds=2",
    f"--nbytes={4 << 20}",
    "--random-reads=64",
    "--latency-reads=16",
    f"--memory-nbytes={8 << 20}",
    "--no-huge-pages",
)
OURS = {"large", "loop", "warm", "random", "latency", "memory", "import", "torch_save", "tune"}
OURS |= {"checkpoint", "checkpoint_load", "checkpoint_objects", "checkpoint_async"}

pytest.importorskip("torch")
pytest.importorskip("rich")


def run(scenario: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """Run a scenario as a user does, and return its JSON."""
    result = directory / "out.json"
    command = [sys.executable, "-m", "benchmarks", scenario, *TINY, *arguments]
    done = subprocess.run(
        [*command, f"--directory={directory}", f"--json={result}"],
        cwd=ROOT,
        # Where the tests of DeepSpeed have its own engine compiled.
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(ROOT / "build/torch_extensions")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in directory.iterdir()] == ["out.json"], "left files behind"
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def rows_of(content: dict[str, Any], scenario: str) -> list[dict[str, Any]]:
    comparisons = content["scenarios"][scenario]["comparisons"]
    return [row for comparison in comparisons for row in comparison["rows"]]


@pytest.mark.parametrize("scenario", sorted(OURS - {"loop"}))
def test_scenario_measures_every_contender(scenario: str, tmp_path: Path) -> None:
    content = run(scenario, tmp_path)
    rows = rows_of(content, scenario)
    assert any(row["kind"] == "ours" for row in rows)
    assert {row["label"]: row["failure"] for row in rows if row["failure"]} == {}
    assert all(len(row["samples"]) >= 2 for row in rows)
    assert content["figures"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a loop device needs root")
@pytest.mark.skipif(shutil.which("losetup") is None, reason="losetup is not installed")
def test_loop_device_is_detached_again(tmp_path: Path) -> None:
    content = run("loop", tmp_path)
    if not content["scenarios"]["loop"]["comparisons"]:
        pytest.skip(content["scenarios"]["loop"]["notes"][0])
    assert {row["failure"] for row in rows_of(content, "loop")} == {None}
    assert "tensorferry-bench" not in Path("/proc/self/mounts").read_text()
    attached = subprocess.run(["losetup", "--list"], capture_output=True, text=True).stdout
    assert "tensorferry-bench" not in attached


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed not installed")
def test_deepspeed_scenario_measures_ours_even_where_theirs_fails(tmp_path: Path) -> None:
    content = run("deepspeed", tmp_path)
    ours = [row for row in rows_of(content, "deepspeed") if row["kind"] == "ours"]
    assert ours
    assert {row["failure"] for row in ours} == {None}


@pytest.mark.slow
def test_ds_io_scenario_measures_ours_even_where_theirs_fails(tmp_path: Path) -> None:
    content = run("ds_io", tmp_path, "--no-deepspeed")
    ours = [row for row in rows_of(content, "ds_io") if row["kind"] == "ours"]
    assert len(ours) == 4
    assert {row["failure"] for row in ours} == {None}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed not installed")
def test_zero3_scenario_trains_ours_even_where_theirs_fails(tmp_path: Path) -> None:
    content = run("zero3", tmp_path)
    ours = [row for row in rows_of(content, "zero3") if row["kind"] == "ours"]
    assert len(ours) == 2
    assert {row["failure"] for row in ours} == {None}
    differences = [figure for figure in content["figures"] if "losses" in figure["what"]]
    assert {figure["measured"] for figure in differences} <= {0}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing")
def test_plot_is_drawn(tmp_path: Path) -> None:
    plot = tmp_path.parent / f"{tmp_path.name}.png"
    run("import", tmp_path, f"--plot={plot}")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_large_is_compared_with_fio(tmp_path: Path) -> None:
    rows = rows_of(run("large", tmp_path), "large")
    assert any(row["kind"] == "fio" and row["median"] for row in rows)


def test_a_crashing_peer_is_a_row_and_not_the_end(tmp_path: Path) -> None:
    """The harness itself: a worker that dies leaves a message, and the other contender goes on."""
    script = """
import sys
from pathlib import Path
from benchmarks.harness import Comparison, Contender, Sample, Settings, compare
from benchmarks.worker import workers
with workers() as make:
    worker = make("os:abort")
    dying = Contender("dying", "peer", lambda number: worker.sample("anything"))
    living = Contender("living", "ours", lambda number: Sample(1.0, 1.0))
    rows = compare(Settings(Path()), Comparison("c", ""), [dying, living], rounds=3).rows
print(rows[0].failure, len(rows[1].samples))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "SIGABRT" in done.stdout, done.stderr
    assert done.stdout.split()[-1] == "3"
