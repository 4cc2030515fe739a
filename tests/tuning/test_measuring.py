"""The parts of benchmarks: contenders in rounds, memory and its checks, files, fio, charts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tensorferry.tuning import bench, fio
from tensorferry.tuning.bench import Job, Place
from tensorferry.tuning.moving import Memory, Task, ValidationError
from tensorferry.tuning.rounds import (
    Comparison,
    Contender,
    Estimate,
    MeasurementError,
    Row,
    Sample,
    take_turns,
)
from tensorferry.tuning.scratch import make_cold, make_warm, remove, scratch_directory
from tensorferry.tuning.workers import WorkerError
from tests.support import required

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096


def row(label: str, *values: float) -> Row:
    return Row(label, "ours", samples=[Sample(value, 1.0) for value in values])


def test_contenders_take_turns_in_an_order_that_changes_and_the_rest_goes_on_without_one() -> None:
    """The first round has the given order, because a contender may need the measurement of an earlier one."""
    turns: list[tuple[int, str]] = []

    def contender(label: str) -> Contender:
        def measure(number: int) -> Sample:
            turns.append((number, label))
            if (number, label) == (1, "D"):
                raise MeasurementError("broken")
            return Sample(1.0, 1.0)

        return Contender(label, "ours", measure)

    told: list[tuple[str, int, int]] = []
    found = take_turns(
        Comparison("c", ""), [contender(c) for c in "ABCD"], 9, lambda *said: told.append(said)
    )
    orders = ["".join(label for number, label in turns if number == n) for n in range(9)]
    assert orders[0] == "ABCD"
    assert all(sorted(order)[:3] == list("ABC") for order in orders)
    assert len(set(orders)) > 4
    assert found.rows[3].failure == "broken"
    assert not found.row("D")
    assert [len(each.samples) for each in found.rows] == [9, 9, 9, 1]
    assert (told[0], told[-1][1:]) == (("c A", 0, 36), (35, 36))


def test_figures_are_medians_with_ranges_and_ratios_those_of_the_same_round() -> None:
    base = [10.0, 11, 9, 20]
    parts = (0.8, 0.81, 0.8, 0.8)
    slower = [value * part for value, part in zip(base, parts, strict=True)]
    comparison = Comparison("c", "", rows=[row("base", *base), row("slow", *slower)])
    over = comparison.over("slow", "base")
    assert isinstance(over, Estimate)
    assert (over, over.low, over.high) == pytest.approx((0.8, 0.8, 0.81))
    assert comparison.median("base") == 10.5
    assert comparison.over("slow", "missing") is None
    assert [each.label for each in comparison.sorted_rows()] == ["base", "slow"]
    assert Comparison("c", "", "s", comparison.rows).sorted_rows()[0].label == "slow"
    content = json.loads(json.dumps(comparison.as_dict()))
    assert content["rows"][0]["range"] == [9, 20]


@pytest.mark.parametrize("kind", ["locked", "ordinary"])
@pytest.mark.parametrize("nbytes", [1, 8, PAGE - 1, (2 << 20) + 3])
def test_what_was_written_passes_the_check(kind: str, nbytes: int, directory: Path) -> None:
    memory = Memory(nbytes, kind)
    memory.fill(1)
    tensorferry.write(directory / "file", memory.host)
    memory.check(directory / "file")
    memory.fill(0)
    with pytest.raises(ValidationError, match="differ"):
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


def test_memory_of_a_gpu_is_given_as_it_is_or_by_way_of_the_host(directory: Path) -> None:
    torch = pytest.importorskip("torch")
    nbytes = (9 << 20) + 5  # larger than one fill
    device = torch.zeros(nbytes, dtype=torch.uint8)  # in place of a GPU tensor
    memory = Memory(nbytes, "gpu", device)
    memory.fill(1)
    path = directory / "file"
    with memory.buffer_for(write=True) as given:
        assert given is device
    tensorferry.write(path, device)
    memory.check(path)
    for staged in (memory, Memory(nbytes, "locked", device)):
        with staged.buffer_for(write=True, on_host=True) as host:
            assert bytes(host) == path.read_bytes()
        memory.fill(0)
        with pytest.raises(ValidationError, match="differ"):
            memory.check(path)
        with staged.buffer_for(write=False, on_host=True) as host:
            host[:] = path.read_bytes()
        memory.check(path)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_task_notices_a_file_that_was_changed(operation: str, directory: Path) -> None:
    path = directory / "file"
    job = Job((Place(directory, 0),), io_nbytes=1 << 16, validate=True)
    task = Task(job, 0, {operation: [path]})
    task.begin(operation, ["aio_handle"])
    for loop in range(2):
        task.prepare("aio_handle", operation, loop)
        moved = task.move("aio_handle")
        assert moved["ended"] > moved["started"]
        assert moved["settings"]["queue_depth"] == 128
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"?")
    with pytest.raises(ValidationError, match="differ"):
        task._methods["aio_handle"].check()
    task.end()


def test_a_failure_of_any_process_ends_the_benchmark_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[object, ...]] = []

    def call_all(workers: object, *call: object) -> list[list[str]]:
        called.append(call)
        if call[0] == "move":
            raise WorkerError("process 0: No space left on device")
        return [[]]

    monkeypatch.setattr(bench, "call_all", call_all)
    job = Job((Place(directory, 0),), ("write",), io_nbytes=1 << 16, compare=True)
    with pytest.raises(bench.BenchError, match="No space left"):
        bench.run(job)
    assert [call[:2] for call in called] == [
        ("begin", "write"),
        ("prepare", "aio_handle"),
        ("move", "aio_handle"),
    ]
    assert list(directory.iterdir()) == []


def test_an_orphaned_task_removes_what_is_new_and_nothing_else(directory: Path) -> None:
    old, new = directory / "old", directory / "new"
    old.write_bytes(b"x" * 65536)
    job = Job((Place(directory, 0),), io_nbytes=1 << 16, keep_files=True)
    task = Task(job, 0, {"read": [old, new]})
    task.begin("read", ["aio_handle"])
    assert new.exists()
    task.on_orphaned()
    assert list(directory.iterdir()) == [old]


def test_processes_together_take_from_the_first_start_to_the_last_end() -> None:
    each = {"cpu_seconds": 0.5, "peak_growth_nbytes": 7, "settings": {}}
    moved = [
        {"started": 0.0, "ended": 1.0, "latency_microseconds": {"p99": 3.0}}
        | {"gpu": {"gpu_nbytes": 10, "gds_nbytes": 8, "compat": False}},
        {"started": 0.5, "ended": 2.0, "latency_microseconds": {"p99": 9.0}}
        | {"gpu": {"gpu_nbytes": 5, "gds_nbytes": 0, "compat": True}},
    ]
    sample = bench._combine(10**9, [each | one for one in moved])
    assert (sample.seconds, sample.value) == (2.0, 1.0)
    assert (sample.cpu_seconds_per_gb, sample.peak_growth_nbytes) == (0.5, 14)
    assert sample.details["latency_microseconds"] == {"p99": 9.0}
    assert sample.details["gpu"] == {"gpu_nbytes": 15, "gds_nbytes": 8, "compat": True}
    alone = [process.value for process in sample.details["processes"]]
    assert alone == pytest.approx([1.0, 2 / 3])
    together = bench.summary([sample, sample])
    assert (together["loops"], together["nbytes"]) == (2, 4 * 10**9)
    assert together["gb_per_second_median"] == together["gb_per_second_total"] == 1.0


def test_scratch_files_are_fresh_cold_warm_and_gone(directory: Path) -> None:
    def interrupted() -> None:
        with scratch_directory(directory, "x-") as path:
            (path / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(directory.iterdir()) == []
    path = directory / "file"
    path.write_bytes(b"content" * 10_000)
    for prepare in (make_cold, make_warm, lambda path: make_warm(path, 0.5)):
        prepare(path)
        assert path.read_bytes() == b"content" * 10_000
    (directory / "tree").mkdir()
    for each in (path, path, directory / "tree"):
        remove(each)
    assert list(directory.iterdir()) == []


def test_fio_runs_a_job_for_each_file(directory: Path) -> None:
    required.command("fio")
    files = [directory / "a:b", directory / "c"]
    config = fio.Config("libaio", 64 << 10, 4)
    jobs = fio.run(files, "write", 1 << 20, config.arguments())
    assert [path.stat().st_size for path in files] == [1 << 20] * 2
    for job in jobs:
        sample = fio.sample(job, "write")
        assert sample.nbytes == 1 << 20
        latency = sample.details["latency_microseconds"]
        assert latency["p99"] >= latency["p50"] > 0
    assert config.label == "fio libaio 64k qd4"
