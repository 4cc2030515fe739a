"""GPUs in benchmarks, tuning and the report: on the stand-in driver, in processes of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.tuning import gpus
from tensorferry.tuning.bench.arguments import Job, make_job
from tensorferry.tuning.machine.libraries import asking
from tensorferry.tuning.options import BadArgumentsError
from tests.support import child, standin

if TYPE_CHECKING:
    import pathlib

PROGRAMS = "tests.tuning.gpu_programs"
MIB = 1 << 20


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that are started use the stand-in."""
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("TENSORFERRY_GDS", "TENSORFERRY_ENGINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("way", ["aio_handle", "files"])
def test_bench_gives_gpu_memory_to_handles_and_files_as_it_is(
    way: str, directory: pathlib.Path
) -> None:
    said = child.call(f"{PROGRAMS}:bench", directory=directory, way=way, nvidia_fs=True).result
    assert said["right"]
    assert said["write"] == said["read"] == {"gpu_nbytes": MIB, "gds_nbytes": 0}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("nvidia_fs", [True, False])
def test_bench_says_whether_a_gds_handle_bypassed_host_memory(
    nvidia_fs: bool, directory: pathlib.Path
) -> None:
    said = child.call(
        f"{PROGRAMS}:bench", directory=directory, way="gds_handle", nvidia_fs=nvidia_fs
    ).result
    by_cufile = MIB if nvidia_fs else 0
    assert said["right"]
    assert said["write"] == said["read"]
    assert said["read"] == {"gpu_nbytes": MIB, "gds_nbytes": by_cufile, "compat": not nvidia_fs}
    assert said["settings"]["engine"].endswith("(compat)") is not nvidia_fs
    assert said["pinned"] == 0, "pinned memory was let go"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("gds", "nvidia_fs"), [(False, True), (True, True), (True, False)])
def test_tune_moves_memory_of_a_gpu_for_each_folder(
    gds: bool, nvidia_fs: bool, directory: pathlib.Path
) -> None:
    found = child.call(f"{PROGRAMS}:tune", directory=directory, gds=gds, nvidia_fs=nvidia_fs).result
    native = gds and nvidia_fs
    assert found["moved"] == [32 * MIB, 32 * MIB]
    assert found["gpu_nbytes"] == [32 * MIB, 32 * MIB]
    assert found["gds_nbytes"] == ([32 * MIB, 32 * MIB] if native else [0, 0])
    assert found["engine"] == ("cufile" if native else "threads")
    assert (found["pinned"], found["pinned_afterwards"]) == (2 if native else 0, 0)
    assert list(directory.iterdir()) == []


def cuda_facts() -> Any:
    with asking("cuda") as answer:
        return answer(300.0)


@pytest.mark.usefixtures("stand_in")
def test_the_report_asks_for_cuda_and_cufile_in_another_process() -> None:
    facts = cuda_facts()
    assert facts["driver"] == {"usable": True, "reason": None}
    assert facts["cufile"]["usable"]
    assert facts["cufile"]["mode"] == "native"
    assert "nvidia-fs" in facts["cufile"]["detail"]
    assert json.loads(json.dumps(facts)) == facts


def test_the_report_says_why_cuda_and_cufile_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORFERRY_LIBCUDA", "/nonexistent/libcuda.so.1")
    facts = cuda_facts()
    assert not facts["driver"]["usable"]
    assert "/nonexistent/libcuda.so.1" in facts["driver"]["reason"]
    assert not facts["cufile"]["usable"]
    assert facts["cufile"]["mode"] is None

    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORFERRY_LIBCUFILE", "/nonexistent/libcufile.so.0")
    facts = cuda_facts()
    assert facts["driver"]["usable"]
    assert "/nonexistent/libcufile.so.0" in facts["cufile"]["reason"]


# Arguments, with GPUs as they are said to be


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "device_count", lambda: 2)
    for name in ("why_no_gpu", "why_no_gds"):
        monkeypatch.setattr(gpus, name, lambda: None)


def job(directory: pathlib.Path, **arguments: object) -> Job:
    return make_job(folder=str(directory), gpu=True, **arguments)


@pytest.mark.usefixtures("two_gpus")
def test_tensors_are_staged_only_where_host_memory_is_asked_for(directory: pathlib.Path) -> None:
    assert job(directory).memory == "gpu"
    assert job(directory, memory="locked").memory == "locked"
    assert job(directory, memory="accelerator").memory == "accelerator"
    assert job(directory, slow_bounce_buffer=True).memory == "locked"
    assert job(directory, memory="ordinary", slow_bounce_buffer=True).memory == "ordinary"
    assert make_job(folder=str(directory)).memory == "locked"


@pytest.mark.usefixtures("two_gpus")
def test_gds_handle_takes_the_place_of_aio_handle(directory: pathlib.Path) -> None:
    gds = job(directory, use_gds=True)
    assert (gds.way, gds.memory, gds.notes) == ("gds_handle", "gpu", ())
    (note,) = job(directory, use_gds=True, memory="locked").notes
    assert "--use-gds" in note
    with pytest.raises(BadArgumentsError) as bad:
        job(directory, use_gds=True, engine="files", io_engine="threads")
    assert [problem.split(":")[0] for problem in bad.value.problems] == ["--use-gds", "--io-engine"]


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(BadArgumentsError, match="there is no device 2; torch finds 2"):
        job(directory, multi_process="3")


def test_what_gpus_lack_is_said(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "why_no_gpu", lambda: "no GPU today")
    monkeypatch.setattr(gpus, "why_no_gds", lambda: "no cuFile today")
    with pytest.raises(BadArgumentsError) as bad:
        job(directory, use_gds=True)
    assert bad.value.problems == ["--use-gds: no cuFile today", "--gpu: no GPU today"]
