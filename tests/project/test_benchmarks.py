"""Every benchmark scenario runs, at sizes too small for its numbers to mean anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import deepspeed_gcc, required, warm
from tests.support.faultfs import why_unavailable
from tests.support.leaks import settled

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--rounds=1", f"--nbytes={4 << 20}", "--parameters=1000000", "--no-huge-pages")
ON_LOOP_DEVICES = {"segments", "safetensors_loop", "checkpoint_loop"}
# With DeepSpeed.
WITH_OTHERS = {"deepspeed", "zero3", "offload_deepspeed", "larger_than_memory"}

pytest.importorskip("torch")
required.module("rich")
required.module("psutil")

from benchmarks.__main__ import only_benchmark  # noqa: E402
from benchmarks.bench import Figure, Outcome, measured  # noqa: E402
from benchmarks.scenarios import SCENARIOS  # noqa: E402

from tensorferry.tuning.rounds import (  # noqa: E402
    Comparison,
    Contender,
    Estimate,
    Sample,
    take_turns,
)
from tensorferry.tuning.workers import UnavailableError, Worker, closing  # noqa: E402


def run(scenario: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """Run a scenario as a user does, and return its JSON."""
    python = sys.executable if scenario == "import" else warm.python()
    result = directory / "out.json"
    command = [python, "-m", "benchmarks", scenario, *TINY, *arguments]
    done = subprocess.run(
        [*command, f"--directory={directory}", f"--json={result}"],
        cwd=ROOT,
        env=os.environ | deepspeed_gcc.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in directory.iterdir()] == ["out.json"], "left files behind"
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def rows_of(content: dict[str, Any], scenario: str) -> list[dict[str, Any]]:
    comparisons = content["scenarios"][scenario]["comparisons"]
    return [row for comparison in comparisons for row in comparison["rows"]]


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - ON_LOOP_DEVICES - WITH_OTHERS))
def test_scenario_measures_every_contender(scenario: str, tmp_path: Path) -> None:
    if scenario == "safetensors_mount" and (reason := why_unavailable()):
        required.missing("fuse", reason)
    content = run(scenario, tmp_path)
    rows = rows_of(content, scenario)
    assert any(row["kind"] == "ours" for row in rows)
    assert {row["label"]: row["failure"] for row in rows if row["failure"]} == {}
    assert all(row["samples"] for row in rows)
    assert content["figures"]
    if scenario == "large" and required.command("fio"):
        assert any(row["kind"] == "fio" and row["median"] for row in rows)


def detached() -> bool:
    """Return whether no benchmark has anything mounted."""
    attached = subprocess.run(["losetup", "--list"], capture_output=True, text=True).stdout
    return "tensorferry-bench" not in attached + Path("/proc/self/mounts").read_text()


@pytest.mark.root
def test_loop_devices_are_detached_again(tmp_path: Path) -> None:
    for scenario in sorted(ON_LOOP_DEVICES):  # in turn: each must detach its devices
        content = run(scenario, tmp_path)
        if notes := [note for note in content["scenarios"][scenario]["notes"] if "needs" in note]:
            required.missing("mounts", notes[0])
        assert {row["failure"] for row in rows_of(content, scenario)} == {None}
        assert all(figure["measured"] is not None for figure in content["figures"])
        assert settled(detached)  # concurrent benchmarks of other tests may still end


@pytest.mark.usefixtures("own_engine")
@pytest.mark.parametrize(
    ("scenario", "count"), [("deepspeed", 1), ("zero3", 2), ("larger_than_memory", 1)]
)
def test_scenarios_measure_ours_even_where_deepspeeds_fails(
    scenario: str, count: int, tmp_path: Path
) -> None:
    content = run(scenario, tmp_path)
    ours = [row for row in rows_of(content, scenario) if row["kind"] == "ours"]
    assert len(ours) >= count
    assert {row["failure"] for row in ours} == {None}
    differences = [figure for figure in content["figures"] if "losses" in figure["what"]]
    assert {figure["measured"] for figure in differences} <= {0}


def test_a_crashing_peer_is_a_row_and_not_the_end() -> None:
    """A worker that dies leaves a message, and the other contender continues."""
    with closing([Worker("os:abort")]) as (worker,):
        dying = Contender("dying", "peer", measured(worker, "anything"))
        living = Contender("living", "ours", lambda _: Sample(1.0, 1.0))
        rows = take_turns(Comparison("c", ""), [dying, living], rounds=3).rows
    assert "SIGABRT" in (rows[0].failure or "")
    assert len(rows[1].samples) == 3


def test_pages_name_all_scenarios_and_no_others() -> None:
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for words in re.findall(r"-m benchmarks ((?:[a-z0-9_]+[ `]?)+)", page.read_text()):
            assert set(words.replace("`", " ").split()) <= set(SCENARIOS), page
    table = (ROOT / "benchmarks/README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(SCENARIOS)


def test_figures_say_whether_their_median_keeps_them() -> None:
    over = Estimate.of([0.7, 0.8, 0.95])
    assert Figure("slow", ">=", 0.9, over).verdict == "missed"
    assert Figure("slow", "<=", 0.9, over).verdict == "met"
    assert Figure("nothing", ">=", 0.9, None).verdict == "not measured"
    assert Figure("slow", ">=", 0.7, over).as_dict()["range"] == [0.7, 0.95]


def test_one_benchmark_at_a_time_and_no_file_of_others_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that all users can write to, the benchmark must not follow a planted link."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    (shared / "tensorferry-benchmarks.lock").symlink_to(victim)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = """
from benchmarks.__main__ import only_benchmark
with only_benchmark(lambda: print("waits", flush=True)):
    print("runs")
"""
    with only_benchmark(lambda: pytest.fail("waits without another benchmark")):
        other = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
    assert other.communicate(timeout=300)[0] == "runs\n"
    assert not victim.exists()
    assert [path.name for path in shared.iterdir()] == ["tensorferry-benchmarks.lock"]


def test_a_scenario_that_cannot_run_does_not_fail_the_run_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__ as program

    def lacking(settings: object) -> Outcome:
        raise UnavailableError("no such machine")

    monkeypatch.setattr(program, "SCENARIOS", {"lacking": lacking, "rest": lambda _: Outcome()})
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main([*TINY, f"--directory={tmp_path}"]) == 0
    assert "lacking: no such machine" in capsys.readouterr().out
    assert program.main(["lacking", *TINY, f"--directory={tmp_path}"]) == 1
    assert program.main(["rest", *TINY, f"--directory={tmp_path}"]) == 0
