"""`tensorferry-ds-io`: the command lines of ds_io, and the output that scripts parse."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tensorferry.cli import bench as command
from tensorferry.cli import ds_io, options
from tests.cli.running import Done, bench, here
from tests.support import mounts
from tests.support.child import ROOT

SIZE = 2 << 20

# As a DeepSpeed sweep composes them.
COMMAND_LINES = [
    "--folder {0} --io_size 2M",
    "--read --engine aio_handle --loops 1 --io_size 2M --folder_to_device_mapping {0}:0 {1}:1 "
    "--block_size 1M --queue_depth 32 --sequential_requests --single_submit --io_parallel 2",
    "--folder {0} --io_size 2M --engine files --validate --multi_process 2",
    "--folder {0} --io_size 2M --different_file_each_iteration --warmup_loops 0 --loops 2",
    "--folder {0} --io_size 2M --use_accelerator_pin_memory --include_warmup_time --fast_io_size 1M",
    "--folder {0} --io_size 2M --slow_bounce_buffer",
]


def run(command_line: str, *folders: Path, expect: int = 0) -> Done:
    return here(ds_io.main, *command_line.format(*folders).split(), expect=expect)


def speed(output: str, metric: str) -> float:
    """Read a speed as DeepSpeed's sweep does: the last word but one of its line."""
    [line] = [line for line in output.splitlines() if line.startswith(metric)]
    return float(line.split()[-2])


@pytest.mark.parametrize("command_line", COMMAND_LINES)
def test_command_lines_of_ds_io_run(command_line: str, directory: Path) -> None:
    second = directory / "second"
    second.mkdir()
    output = run(command_line, directory, second).stdout
    operation = "Read" if "--read" in command_line else "Write"
    assert speed(output, f"E2E {operation} Speed") > 0
    assert speed(output, f"Task {operation} Speed") > 0
    assert re.search(rf"^E2E {operation} Latency = \d+\.\d+(e-\d+)? sec$", output, re.MULTILINE)


def test_saving_with_torch_is_measured(directory: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    for extra in ("", "--torch_legacy_save"):
        output = run(f"--folder {{0}} --io_size 2M --engine torch_io {extra}", directory).stdout
        assert speed(output, "E2E Write Speed") > 0


def test_speeds_fit_their_latencies_in_units_of_ds_io(directory: Path) -> None:
    output = run("--folder {0} --io_size 2M --loops 4", directory).stdout
    [seconds] = [float(x) for x in re.findall(r"E2E Write Latency = (\S+)", output)]
    assert speed(output, "E2E Write Speed") == pytest.approx(4 * SIZE / 2**30 / seconds)


def test_files_have_the_names_of_ds_io_and_stay(directory: Path) -> None:
    run("--folder {0} --io_size 2M --loops 1 --multi_process 2", directory)
    run("--folder {0} --io_size 2M --loops 1 --read", directory)
    assert {path.name: path.stat().st_size for path in directory.iterdir()} == {
        f"_aio_{name}_{SIZE}.pt.{number}": SIZE
        for name, number in (("write", "0_0"), ("write", "1_0"), ("read", "0_0"))
    }


def test_a_run_that_fails_leaves_only_what_was_there(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "small", 3 << 20) as directory:
        (directory / "mine").write_bytes(b"z" * (1 << 20))
        (directory / f"_aio_read_{SIZE}.pt.0_0").write_bytes(b"z" * 100)
        done = run("--folder {0} --io_size 2M --multi_process 2 --read", directory, expect=1)
        assert done.stderr.startswith("tensorferry-ds-io: ")
        assert {path.name for path in directory.iterdir()} >= {"mine"}
        assert not (directory / f"_aio_read_{SIZE}.pt.1_0").exists()


def test_defaults_are_those_of_ds_io(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(command, "measure", lambda job: jobs.append(job) or command.Results(job))
    run("--folder {0} --io_size 2M", directory)
    run("--folder {0} --io_size 2M --read", directory)
    assert [job.operations for job in jobs] == [("write",), ("read",)]
    for job in jobs:
        assert job.settings == {"block_size": 1 << 20, "queue_depth": 32}
        assert (job.loops, job.warmup_loops, len(job.places)) == (3, 1, 1)
        assert job.keep_files
        assert not any((job.compare, job.validate, job.different_file_each_iteration))


def test_the_page_for_users_of_deepspeed_names_every_option() -> None:
    page = (ROOT / "docs/coming-from-deepnvme.md").read_text()
    for field in options.FIELDS:
        for name in ("ds_io", "ds_nvme_tune"):
            parameter = field.parameter(name)
            if parameter is not None:
                (option,) = parameter.default.param_decls
                assert f"`{option.replace('-', '_').replace('__', '--', 1)}" in page, (name, option)


@pytest.mark.parametrize(
    "arguments", ["--folder /nonexistent --io_size 1M", "--folder {0} --io_size x", "--wings"]
)
def test_a_problem_is_told_in_one_line_and_the_exit_code_is_2(
    arguments: str, directory: Path
) -> None:
    done = run(arguments, directory, expect=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tensorferry-ds-io: ")
    assert done.stdout == ""


@pytest.mark.usefixtures("newest")
def test_help_names_every_option_of_ds_io() -> None:
    origin = importlib.util.find_spec("deepspeed").origin  # type: ignore[union-attr]
    source = (Path(origin).parent / "nvme" / "ds_aio_args.py").read_text()  # type: ignore[arg-type]
    options = re.findall(r"add_argument\(\s*'(--\w+)'", source)
    assert len(options) > 20
    for shown in (run("--help").stdout, bench("--help", COLUMNS="200").stdout):
        assert [option for option in options if option.replace("_", "-") not in shown] == []
