"""The parts of the benchmark: memory and its checks, results, fast saving, fio."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tensorferry.tuning import fio
from tensorferry.tuning.bench.arguments import make_job
from tensorferry.tuning.bench.memory import Memory, ValidationError
from tensorferry.tuning.bench.results import ProcessResult, Result
from tensorferry.tuning.bench.task import Loop, Task
from tensorferry.tuning.options import BadArgumentsError
from tensorferry.tuning.scratch import make_cold, remove, scratch_directory
from tests.support import required

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096


def process(number: int, *loops: tuple[float, float], p99: float | None = None) -> ProcessResult:
    transfers = [Loop(begin, end, cpu_seconds=0.5) for begin, end in loops]
    latency = None if p99 is None else {"p50": 1.0, "p99": p99}
    return ProcessResult(number, "/x", {}, 10**9, transfers, latency)


def test_together_a_loop_lasts_from_the_first_start_to_the_last_end() -> None:
    result = Result(
        "read", "aio_handle", [process(0, (0, 1), (2, 4)), process(1, (0.5, 2), (2, 3))]
    )
    together = result.summary()
    assert result.seconds == [2, 2]
    assert together.gb_per_second == [1, 1]
    assert together.nbytes == 4 * 10**9
    assert together.cpu_seconds_per_gb == pytest.approx(0.5)
    alone = result.summary(result.processes[0])
    assert alone.gb_per_second == [1, 0.5]
    assert alone.gb_per_second_median == 0.75
    assert alone.gb_per_second_total == pytest.approx(2 / 3)


def test_latencies_of_all_are_those_of_the_slowest() -> None:
    processes = [process(0, (0, 1), p99=3), process(1, (0, 1), p99=9)]
    assert Result("read", "x", processes).latency_microseconds == {"p50": 1, "p99": 9}
    assert Result("read", "x", [process(0, (0, 1))]).latency_microseconds is None


@pytest.mark.parametrize("kind", ["locked", "ordinary"])
@pytest.mark.parametrize("nbytes", [1, 7, 8, PAGE - 1, 3 * PAGE + 5, (2 << 20) + 3])
def test_what_was_written_passes_the_check(kind: str, nbytes: int, directory: Path) -> None:
    memory = Memory(nbytes, kind)
    memory.fill(1)
    tensorferry.write(directory / "file", memory.host)
    memory.check(directory / "file")


@pytest.mark.parametrize("fault", ["stale page", "flipped byte", "swapped pages", "short file"])
def test_what_is_wrong_in_a_file_fails_the_check(fault: str, directory: Path) -> None:
    memory = Memory(8 * PAGE, "locked")
    memory.fill(1)
    content = bytearray(memory.host)
    if fault == "flipped byte":
        content[-1] ^= 1
    elif fault == "swapped pages":
        content[:PAGE], content[PAGE : 2 * PAGE] = content[PAGE : 2 * PAGE], content[:PAGE]
    elif fault == "short file":
        del content[-1]
    (directory / "file").write_bytes(content)
    if fault == "stale page":
        memory.fill(2)
    with pytest.raises(ValidationError, match="differ"):
        memory.check(directory / "file")


@pytest.mark.parametrize("again", [False, True])
def test_memory_elsewhere_is_copied_within_the_transfer(again: bool) -> None:
    torch = pytest.importorskip("torch")
    device = torch.arange(64, dtype=torch.uint8)  # stands for a GPU's
    memory = Memory(64, "locked", device, pin_each_time=again)
    with memory.transferred("write") as host:
        assert bytes(host) == bytes(range(64))
    with memory.transferred("read") as host:
        host[:] = bytes(64)
    assert not device.any()
    memory.fill(3)
    assert bytes(device.numpy()) == bytes(memory.host)


def test_memory_of_a_gpu_is_given_as_it_is_and_to_plain_python_as_a_copy(directory: Path) -> None:
    torch = pytest.importorskip("torch")
    nbytes = (9 << 20) + 5  # more than is filled at once
    device = torch.zeros(nbytes, dtype=torch.uint8)  # stands for a GPU's
    memory = Memory(nbytes, "gpu", device)
    memory.fill(1)
    path = directory / "file"
    for operation in ("write", "read"):
        with memory.transferred(operation) as given:
            assert given is device
    tensorferry.write(path, memory.content())
    memory.check(path)
    with memory.on_host("write") as host:
        assert bytes(host) == path.read_bytes()
    memory.clear()
    assert not device.any()
    with pytest.raises(ValidationError, match="differ"):
        memory.check(path)
    with memory.on_host("read") as host:
        host[:] = path.read_bytes()
    memory.check(path)


def test_ways_of_a_gpus_bytes_are_those_of_all_processes() -> None:
    first = {"gpu_nbytes": 10, "gds_nbytes": 8, "compat": False}
    second = {"gpu_nbytes": 5, "gds_nbytes": 0, "compat": True}
    processes = [
        dataclasses.replace(process(number, (0, 1)), gpu=gpu)
        for number, gpu in enumerate((first, second))
    ]
    both = {"gpu_nbytes": 15, "gds_nbytes": 8, "compat": True}
    assert Result("read", "x", processes).gpu == both
    assert Result("read", "x", [process(0, (0, 1))]).gpu is None


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_task_notices_a_file_that_was_changed(operation: str, directory: Path) -> None:
    path = directory / "file"
    job = make_job(folder=str(directory), io_size="64K", validate=True)
    task = Task(job, 0, {operation: [path]})
    task.begin(operation, ["aio_handle"])
    for loop in range(2):
        task.prepare("aio_handle", operation, loop)
        assert task.transfer("aio_handle").seconds > 0
        task.check("aio_handle")
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"?")
    with pytest.raises(ValidationError, match="differ"):
        task.check("aio_handle")
    task.end()


def test_an_orphaned_task_removes_what_is_new_and_nothing_else(directory: Path) -> None:
    old, new = directory / "old", directory / "new"
    old.write_bytes(b"x" * 65536)
    job = make_job(folder=str(directory), io_size="64K", keep_files=True)
    task = Task(job, 0, {"read": [old, new]})
    task.begin("read", ["aio_handle"])
    assert new.exists()
    task.orphaned()
    assert list(directory.iterdir()) == [old]


def test_arguments_become_a_job(directory: Path) -> None:
    mappings = [f"{directory}:3", f"{directory}:3"]
    job = make_job(folder_to_device_mapping=mappings, io_size="1G", block_size="8M", loops="7")
    assert [(place.folder, place.device) for place in job.places] == [(directory, 3)] * 2
    assert job.io_nbytes == 1 << 30
    assert job.settings == {"block_size": 8 << 20}
    assert job.total_loops == 8
    assert job.operations == ("write", "read")


def test_nothing_given_means_no_settings_so_that_a_profile_counts(directory: Path) -> None:
    assert make_job(folder=str(directory)).settings == {}


def test_bad_arguments_are_all_in_the_exception() -> None:
    with pytest.raises(BadArgumentsError) as caught:
        make_job(folder="/nonexistent", block_size="0", queue_depth="x")
    assert len(caught.value.problems) == 3


def test_a_scratch_directory_is_gone_after_an_interrupt(directory: Path) -> None:
    def interrupted() -> None:
        with scratch_directory(directory, "x-") as path:
            (path / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(directory.iterdir()) == []


def test_a_cold_file_keeps_its_content_and_a_removed_one_is_gone(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"content")
    make_cold(path)
    assert path.read_bytes() == b"content"
    remove(path)
    remove(path)
    assert not path.exists()


def test_fio_runs_a_job_for_each_file(directory: Path) -> None:
    required.command("fio")
    files = [directory / "a:b", directory / "c"]
    jobs = fio.run(files, "write", 1 << 20, ["--bs=64K", "--direct=1", "--ioengine=libaio"])
    assert [path.stat().st_size for path in files] == [1 << 20] * 2
    for job in jobs:
        measured = fio.measured(job, "write")
        assert measured.nbytes == 1 << 20
        assert measured.latency_microseconds["p99"] >= measured.latency_microseconds["p50"] > 0


def test_a_failure_of_fio_is_raised_in_its_words(directory: Path) -> None:
    required.command("fio")
    with pytest.raises(fio.FioError, match="fio failed"):
        fio.run([directory / "x"], "write", 1 << 20, ["--ioengine=nonexistent"])


def test_missing_fio_is_raised(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert fio.version() is None
    with pytest.raises(fio.FioError, match="not installed"):
        fio.run([directory / "x"], "write", 1 << 20, [])
