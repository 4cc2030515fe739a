"""The file-access examples: DeepNVMe's command lines, right bytes, clear refusals, no files left."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tensorferry.tuning.gpus import gds_refusal
from tests.project import interrupted
from tests.support import deepspeed_gcc, mounts, warm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.data import RandomBytes

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "file_access"
GPU_PROGRAMS = [
    f"{way}_{verb}_gpu_tensor.py" for way in ("py", "aio", "gds") for verb in ("load", "store")
]
FAILED, BAD_ARGUMENTS, MISSING, INTERRUPTED = 1, 2, 3, 130  # examples/file_access/README.md

MISSED = "(no GPU: |GPUDirect Storage is not available: )"

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def command(program: str, *arguments: str | os.PathLike[str]) -> list[str]:
    interpreter = [] if program.endswith(".sh") else [warm.python("torch")]
    return [*interpreter, str(EXAMPLES / program), *map(os.fspath, arguments)]


def run(program: str, *arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(program, *arguments),
        env=os.environ | deepspeed_gcc.ENVIRONMENT | {"PYTHON": warm.python("torch")},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def input_file(directory: Path, random_bytes: RandomBytes) -> Path:
    path = directory / "input.bin"
    path.write_bytes(random_bytes(3_000_017).tobytes())
    return path


def place(program: str, directory: Path, input_file: Path) -> list[str]:
    """Return the arguments that name the folder of a program."""
    if "_load_" in program:
        return [f"--input_file={input_file}"]
    return [f"--nvme_folder={directory}", "--mb_size=3"]


# --- whole programs ---


@pytest.mark.parametrize("verb", ["load", "store"])
def test_script_runs_all_programs_and_passes_over_what_is_missing(
    verb: str, directory: Path, input_file: Path
) -> None:
    where = [input_file] if verb == "load" else [directory, "--mb_size", "3"]
    done = run(f"run_{verb}_tensor.sh", *where, "--loop", "2", "--validate")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = re.findall(
        r"^(\w+ \w+): \d+\.\d+ GB, \d+\.\d+ secs, +\d+\.\d+ GB/sec\nValidation success = True$",
        done.stdout,
        re.MULTILINE,
    )
    assert {f"aio {verb}_cpu", f"py {verb}_cpu"} <= set(measured)
    for device, ways in (("cpu", ("aio", "py")), ("gpu", ("aio", "gds", "py"))):
        for way in ways:
            assert f"{way}_{verb}_{device}_tensor.py --" in done.stdout
            missing = re.search(rf"{way}_{verb}_{device}_tensor.py: {MISSED}", done.stderr)
            assert (f"{way} {verb}_{device}" in measured) != (missing is not None)
    assert list(directory.iterdir()) == [input_file]


@without_gpu
@pytest.mark.parametrize("program", GPU_PROGRAMS)
def test_gpu_program_says_what_is_missing(program: str, directory: Path, input_file: Path) -> None:
    done = run(program, *place(program, directory, input_file))
    assert done.returncode == MISSING
    assert done.stderr.startswith(f"{program}: no GPU: torch ")
    assert "remedy: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(directory.iterdir()) == [input_file]


@pytest.mark.gpu
@with_gpu
@pytest.mark.parametrize("program", GPU_PROGRAMS)
def test_gpu_program_moves_the_right_bytes(program: str, directory: Path, input_file: Path) -> None:
    done = run(program, *place(program, directory, input_file), "--validate")
    if program.startswith("gds") and (why := gds_refusal()):
        assert done.returncode == MISSING
        assert done.stderr == f"{program}: {why}\n"
        pytest.skip(why)
    assert done.returncode == 0, done.stderr
    assert "Validation success = True" in done.stdout
    assert list(directory.iterdir()) == [input_file]


def test_without_cufile_a_gds_program_says_what_is_missing(
    module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = module("utils")
    monkeypatch.setattr(utils, "require_gpu", lambda: None)
    monkeypatch.setenv("TENSORFERRY_LIBCUFILE", "/nonexistent/libcufile.so.0")
    why = gds_refusal()
    if why is None:
        pytest.skip("this process has opened cuFile already")
    with pytest.raises(utils.MissingError) as missing:
        utils.require_gds()
    assert str(missing.value) == why


@pytest.mark.usefixtures("own_engine")
def test_comparison_prints_each_program_and_its_speedup(directory: Path) -> None:
    done = run("compare.py", "--nvme_folder", directory, "--mb_size=2", "--loop=1", "--rounds=1")
    assert done.returncode == 0, done.stderr
    for verb in ("load", "store"):
        assert re.search(rf"^\| py_{verb}_cpu_tensor.py \|.*\| 1\.00 \|$", done.stdout, re.M)
        assert re.search(rf"^\| aio_{verb}_cpu_tensor.py \|.*\| \d+\.\d\d \|$", done.stdout, re.M)
        assert f"| deepspeed_{verb}_cpu_tensor.py |" in done.stdout
    assert list(directory.iterdir()) == []


# --- their parts ---


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a program, or the module that they share."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    for name in [path.stem for path in EXAMPLES.glob("*.py")]:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("nbytes", [1, 4_097, 1_000_003])
def test_programs_store_and_load_just_the_bytes(
    nbytes: int, directory: Path, random_bytes: RandomBytes, module: Callable[[str], Any]
) -> None:
    tensor = torch.from_numpy(random_bytes(nbytes))
    plain, ours = str(directory / "plain"), str(directory / "ours")
    with tensorferry.aio_handle() as handle:
        module("py_store_cpu_tensor").file_write(plain, tensor)
        module("aio_store_cpu_tensor").file_write(ours, tensor, handle)
        assert Path(plain).read_bytes() == Path(ours).read_bytes() == tensor.numpy().tobytes()

        loaded = module("py_load_cpu_tensor").file_read(ours)
        buffer = handle.new_cpu_locked_tensor(nbytes, tensor)
        assert torch.equal(loaded, tensor)
        assert torch.equal(module("aio_load_cpu_tensor").file_read(plain, handle, buffer), tensor)


def test_validation_finds_a_wrong_byte(
    input_file: Path, module: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    utils, program = module("utils"), module("py_load_cpu_tensor")
    options = argparse.Namespace(
        input_file=str(input_file), nbytes=3_000_017, loop=1, validate=True
    )

    def load_wrongly(path: str) -> torch.Tensor:
        tensor = program.file_read(path)
        tensor[-1] ^= 1
        return tensor

    with pytest.raises(SystemExit) as ended:
        utils.measure_load("wrong", options, load_wrongly)
    assert ended.value.code == FAILED
    assert "Validation success = False" in capsys.readouterr().out


def test_validation_finds_bytes_too_many(directory: Path, module: Callable[[str], Any]) -> None:
    path = directory / "longer"
    path.write_bytes(b"12345")
    assert not module("utils").file_holds(str(path), torch.tensor([49, 50], dtype=torch.uint8))


# --- failures ---


def test_load_program_lists_all_bad_arguments(directory: Path) -> None:
    done = run("aio_load_cpu_tensor.py", "--input_file", directory, "--loop=0")
    assert done.returncode == BAD_ARGUMENTS
    assert f"--input_file: {directory} is not a file" in done.stderr
    assert "--loop: 0 is less than 1" in done.stderr
    assert done.stdout == ""


def test_store_program_lists_all_bad_arguments(directory: Path) -> None:
    missing = directory / "missing"
    done = run("py_store_cpu_tensor.py", "--nvme_folder", missing, "--loop=-1", "--mb_size=0")
    assert done.returncode == BAD_ARGUMENTS
    assert f"--nvme_folder: {missing} is not a folder" in done.stderr
    assert "--loop: -1 is less than 1" in done.stderr
    assert "--mb_size: 0 is less than 1" in done.stderr


@pytest.mark.parametrize("script", ["run_load_tensor.sh", "run_store_tensor.sh"])
def test_script_stops_at_bad_arguments(script: str, directory: Path) -> None:
    assert run(script).returncode == BAD_ARGUMENTS
    done = run(script, directory / "missing")
    assert done.returncode == BAD_ARGUMENTS
    assert done.stderr.count("usage: ") == 1


def test_empty_input_file_is_refused(directory: Path) -> None:
    (directory / "empty").touch()
    done = run("py_load_cpu_tensor.py", "--input_file", directory / "empty")
    assert done.returncode == BAD_ARGUMENTS
    assert "is empty" in done.stderr


@pytest.mark.root
@pytest.mark.parametrize("way", ["aio", "py"])
def test_full_disk_is_told_in_one_line_and_leaves_nothing(way: str, directory: Path) -> None:
    with mounts.ext4(directory, 32 << 20) as disk:
        before = sorted(disk.iterdir())
        done = run(f"{way}_store_cpu_tensor.py", "--nvme_folder", disk, "--mb_size=64")
        assert done.returncode == FAILED
        assert "No space left on device" in done.stderr
        assert done.stderr.count("\n") == 1
        assert sorted(disk.iterdir()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_program_removes_its_files(number: signal.Signals, directory: Path) -> None:
    arguments = ["--nvme_folder", directory, "--mb_size=64", "--loop=1000000"]
    program = command("aio_store_cpu_tensor.py", *arguments)
    assert interrupted.returncode(program, directory, number) == INTERRUPTED
    assert list(directory.iterdir()) == []
