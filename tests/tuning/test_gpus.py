"""GPUs in benchmarks, tuning and the report: on the stand-in driver, in separate processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.tuning import gpus
from tensorferry.tuning.bench import Job, Place, problems_of
from tests.support import child, standin

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = "tests.tuning.gpu_programs"
MIB = 1 << 20


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make child processes use the stand-in."""
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("TENSORFERRY_GDS", "TENSORFERRY_ENGINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("way", "nvidia_fs", "stats"),
    [
        ("aio_handle", True, {"gds_nbytes": 0}),
        ("files", True, {"gds_nbytes": 0}),
        ("gds_handle", True, {"gds_nbytes": MIB, "compat": False}),
        ("gds_handle", False, {"gds_nbytes": 0, "compat": True}),
    ],
)
def test_bench_gives_gpu_memory_as_it_is_and_says_whether_it_bypassed_host_memory(
    way: str, nvidia_fs: bool, stats: dict[str, Any], directory: Path
) -> None:
    said = child.call(f"{PROGRAMS}:bench", directory=directory, way=way, nvidia_fs=nvidia_fs).result
    assert said["right"]
    assert said["write"] == said["read"] == {"gpu_nbytes": MIB} | stats
    in_compat = str(said["settings"].get("engine", "")).endswith("(compat)")
    assert in_compat is stats.get("compat", False)
    assert said["pinned"] == 0, "pinned memory was let go"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("gds", "nvidia_fs"), [(False, True), (True, True), (True, False)])
def test_tune_moves_memory_of_a_gpu(gds: bool, nvidia_fs: bool, directory: Path) -> None:
    found = child.call(f"{PROGRAMS}:tune", directory=directory, gds=gds, nvidia_fs=nvidia_fs).result
    native = gds and nvidia_fs
    assert found["memory"] == "gpu1"
    assert found["gpu_nbytes"] == 32 * MIB
    assert found["gds_nbytes"] == (32 * MIB if native else 0)
    assert found["engine"] == ("cufile" if native else "threads")
    assert (found["pinned"], found["pinned_afterwards"]) == (int(native), 0)
    assert list(directory.iterdir()) == []


# Arguments, with pretended GPUs


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "device_count", lambda: 2)
    for name in ("gpu_refusal", "gds_refusal"):
        monkeypatch.setattr(gpus, name, lambda: None)


def job(directory: Path, *options: str) -> Job:
    """Return the job that options of `tensorferry bench` ask for."""
    from tests.cli.running import job_of

    return job_of(directory, "--gpu", *options)


@pytest.mark.usefixtures("two_gpus")
def test_tensors_are_staged_only_where_host_memory_is_asked_for(directory: Path) -> None:
    assert job(directory).memory == "gpu"
    assert job(directory, "--memory=locked").memory == "locked"
    assert job(directory, "--use-accelerator-pin-memory").memory == "accelerator"
    gds = job(directory, "--use-gds", "--memory=locked")
    assert (gds.method, gds.memory) == ("gds_handle", "gpu")


@pytest.mark.usefixtures("two_gpus")
def test_what_does_not_go_together_is_refused(directory: Path) -> None:
    places = tuple(Place(directory, number) for number in range(3))
    bad = Job(places, gpu=True, use_gds=True, engine="files", settings={"engine": "threads"})
    problems = problems_of(bad)
    assert [problem.split(":")[0] for problem in problems] == ["--use-gds", "--io-engine", "--gpu"]
    assert "device 2 does not exist; torch finds 2" in problems[-1]


def test_what_gpus_lack_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_refusal", lambda: "no GPU today")
    monkeypatch.setattr(gpus, "gds_refusal", lambda: "no cuFile today")
    bad = Job((Place(directory, 0),), gpu=True, use_gds=True)
    assert problems_of(bad) == ["--use-gds: no cuFile today", "--gpu: no GPU today"]
