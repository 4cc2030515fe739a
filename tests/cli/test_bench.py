"""`tensorferry bench`: its measurements and its output."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.tuning import gpus
from tests.cli.running import bench, run_fresh
from tests.support import required

if TYPE_CHECKING:
    from pathlib import Path

required.module("typer")

SIZE = 3 << 20

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


SMALL = ("--io-size", SIZE, "--loops=2", "--json")


def measure(directory: Path, *arguments: object, **environment: str) -> dict[str, Any]:
    """Run it small, in a folder that must be empty afterwards, and return its JSON."""
    done = bench(directory, *SMALL, *arguments, **environment)
    assert list(directory.iterdir()) == []
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def found(content: dict[str, Any]) -> list[tuple[str, str]]:
    return [(result["operation"], result["way"]) for result in content["results"]]


def test_bench_writes_and_reads_and_leaves_nothing(directory: Path) -> None:
    content = measure(directory)
    assert found(content) == [("write", "aio_handle"), ("read", "aio_handle")]
    for result in content["results"]:
        together = result["all"]
        assert together["loops"] == len(together["gb_per_second"]) == 2
        assert together["nbytes"] == 2 * SIZE
        assert together["gb_per_second_median"] > 0
        assert together["cpu_seconds_per_gb"] >= 0
        assert together["latency_microseconds"]["p99"] > 0
        assert result["settings"]["engine"] in ("io_uring", "libaio", "threads")


def test_table_has_a_row_for_each_process_and_one_for_all(directory: Path) -> None:
    done = bench(directory, "--io-size=1M", "--loops=1", "--write", "--multi-process=2")
    rows = [line.split()[:3] for line in done.stdout.splitlines() if "write aio_handle " in line]
    assert [row[2] for row in rows[:2]] == ["0", "1"]
    assert re.fullmatch(r"\d+\.\d{3}", rows[2][2])
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout), "control codes"
    assert done.stderr == ""


@pytest.mark.parametrize("engine", ["files", pytest.param("torch_io", marks=needs_torch)])
def test_every_engine_moves_what_it_should(engine: str, directory: Path) -> None:
    content = measure(directory, "--engine", engine, "--validate", "--io-size", SIZE + 13)
    assert found(content) == [("write", engine), ("read", engine)]


def test_options_that_only_deepspeeds_legacy_has_are_accepted_and_noted(directory: Path) -> None:
    options = ("--slow-bounce-buffer", "--torch-legacy-save", "--fast-io-size=1M", "--csv")
    notes = measure(directory, "--write", *options, "--sequential-requests")["notes"]
    for option in options:
        assert f"{option.partition('=')[0]} has no effect" in notes


def test_a_chart_is_drawn_too(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    required.module("matplotlib")
    path = tmp_path_factory.mktemp("chart") / "out.svg"
    measure(directory, "--plot", path, "--loops=1")
    assert "<svg" in path.read_text()
    path.unlink()
    path.symlink_to("/dev/full")
    done = bench(directory, *SMALL, "--plot", path, expect=1)
    assert len(json.loads(done.stdout)["results"]) == 2, "the figures are not lost"
    assert done.stderr == f"tensorferry bench: --plot: {path}: No space left on device\n"


@pytest.mark.parametrize("engine", ["aio_handle", "files"])
def test_settings_given_are_those_in_use(engine: str, directory: Path) -> None:
    options = ["--block-size=64K", "--queue-depth=7", "--io-engine=threads"]
    expected = {"block_size": 65536, "queue_depth": 7, "engine": "threads"}
    if engine == "aio_handle":
        options += ["--io-parallel=3", "--single-submit", "--sequential-requests"]
        expected["intra_op_parallelism"] = 3
    settings = measure(directory, "--engine", engine, *options)["results"][0]["settings"]
    assert expected.items() <= settings.items()


@pytest.mark.parametrize("engine", ["aio_handle", "files"])
def test_settings_of_the_environment_are_used_and_told(engine: str, directory: Path) -> None:
    variables = {"ENGINE": "threads", "BLOCK_SIZE": "128K", "QUEUE_DEPTH": "9"}
    given = {f"TENSORFERRY_{name}": value for name, value in variables.items()}
    content = measure(directory, "--engine", engine, **given)
    assert found(content) == [("write", engine), ("read", engine)]
    expected = {"block_size": 128 << 10, "queue_depth": 9, "engine": "threads"}
    for result in content["results"]:
        assert expected.items() <= result["settings"].items()


def test_files_in_memory_are_noted_as_never_cold(tmpfs_directory: Path) -> None:
    assert any("its reads are never cold" in note for note in measure(tmpfs_directory)["notes"])


def test_processes_work_in_the_folders_they_are_mapped_to(directory: Path) -> None:
    folders = [directory / "a:b", directory / "c"]
    for folder in folders:
        folder.mkdir()
    mappings = [f"--folder_to_device_mapping={folder}:{n}" for n, folder in enumerate(folders)]
    done = bench(mappings[0], "--io_size=1M", "--loops=1", "--write", "--multi_process=2")
    assert "note: --multi-process has no effect" in done.stdout
    done = bench(*mappings, "--io_size=1M", "--loops=1", "--json")
    for result in json.loads(done.stdout)["results"]:
        assert [p["folder"] for p in result["processes"]] == [str(folder) for folder in folders]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_ordinary_memory_is_measured(directory: Path) -> None:
    content = measure(directory, "--memory=ordinary", "--validate")
    assert content["job"]["memory"] == "ordinary"
    assert found(content) == [("write", "aio_handle"), ("read", "aio_handle")]


def test_warm_up_counts_on_request(directory: Path) -> None:
    content = measure(directory, "--warmup-loops=3", "--include-warmup-time", "--write")
    assert content["results"][0]["all"]["loops"] == 5


def test_kept_files_have_ds_io_names_and_are_read_again(directory: Path) -> None:
    options = [directory, "--io-size", SIZE, "--keep-files", "--loops=1"]
    bench(*options, "--different-file-each-iteration")
    names = {
        f"_aio_{operation}_{SIZE}.pt.0_{loop}" for operation in ("read", "write") for loop in (0, 1)
    }
    assert {path.name for path in directory.iterdir()} == names
    read = directory / f"_aio_read_{SIZE}.pt.0_0"
    read.write_bytes(b"x" * SIZE)
    before = read.stat().st_mtime_ns
    bench(*options, "--read", "--validate")
    assert read.stat().st_mtime_ns == before


def test_compare_takes_turns_with_python_and_fio(directory: Path) -> None:
    required.command("fio")
    content = measure(directory, "--compare", "--block-size=256K", "--queue-depth=4", "--validate")
    assert found(content)[:3] == [("write", way) for way in ("aio_handle", "python", "fio")]
    settings = content["results"][2]["settings"]
    assert (settings["block_size"], settings["queue_depth"]) == (256 << 10, 4)
    assert content["results"][2]["all"]["nbytes"] == 2 * SIZE


def test_compare_goes_on_without_fio_and_where_it_fails(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tmp_path_factory.mktemp("bin") / "fio"
    program.write_text("#!/bin/sh\necho out of order >&2; exit 3\n")
    program.chmod(0o755)
    for path, reason in (("/nonexistent", "not installed"), (program.parent, "out of order")):
        content = measure(directory, "--compare", "--write", PATH=f"{path}:/nonexistent")
        assert found(content) == [("write", "aio_handle"), ("write", "python")]
        assert any("fio" in note and reason in note for note in content["notes"])


def test_handles_are_measured_without_torch_and_numpy(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    modules = tmp_path_factory.mktemp("modules")
    for name in ("torch", "numpy"):
        (modules / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    path = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
    for engine in ("aio_handle", "files"):
        arguments = ("bench", directory, *SMALL, "--engine", engine, "--compare")
        content = json.loads(run_fresh(*arguments, PYTHONPATH=path).stdout)
        assert {("write", engine), ("read", engine)} <= set(found(content))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "option",
    ["--engine=files", "--memory=locked", "--use-accelerator-pin-memory", "--use-gds", "--compare"],
)
def test_cuda_tensors_are_measured_and_hold_the_right_bytes(option: str, directory: Path) -> None:
    if reason := gpus.gpu_refusal() or (gpus.gds_refusal() if option == "--use-gds" else None):
        pytest.skip(reason)
    content = measure(directory, "--gpu", "--validate", option)
    way = "gds_handle" if option == "--use-gds" else content["job"]["engine"]
    results = [result for result in content["results"] if result["way"] == way]
    assert [result["operation"] for result in results] == ["write", "read"]
    for result in results:
        moved = result["gpu"] and result["gpu"]["gpu_nbytes"]
        assert moved == (None if "memory" in option else 3 * SIZE)
