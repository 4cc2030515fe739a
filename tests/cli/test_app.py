"""The command line as a whole: its commands, its exit codes, its requirements."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy
import pytest

import tensorferry
from tensorferry.cli.exit_codes import reporting_failures
from tensorferry.safetensors.numpy import save_file
from tests.cli.running import ended, run
from tests.support import required, warm

if TYPE_CHECKING:
    from pathlib import Path

required.module("typer")
required.module("rich")

COMMANDS = ("report", "bench", "tune", "ls", "verify", "convert")


@functools.cache
def help_of(*command: str, width: int = 120) -> str:
    return run(*command, "--help", COLUMNS=str(width)).stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_explains_itself(command: str) -> None:
    assert f" {command} " in help_of()
    shown = run(command, "-h").stdout
    assert "Usage:" in shown
    assert len(shown) > 300
    assert "\x1b" not in shown


def test_it_tells_its_version() -> None:
    assert run("--version").stdout == f"tensorferry {tensorferry.__version__}\n"


PROBLEMS = {
    "an unknown command": ("fly",),
    "an unknown option": ("ls", "--wings"),
    "a missing argument": ("verify",),
    "a path that is not there": ("report", "/nonexistent"),
    "a checkpoint that is not there": ("ls", "/nonexistent"),
    "no checkpoint": ("verify", "README.md"),
    "nothing to convert": ("convert", "/nonexistent", "x"),
    "a size that is none": ("bench", ".", "--io-size=many"),
    "a number that is none": ("bench", ".", "--loops=many"),
    "a number out of range": ("bench", ".", "--queue-depth=0"),
    "no folder to tune for": ("tune",),
    "a folder that is not there": ("tune", "/nonexistent"),
    "no folder to measure in": ("bench",),
    "another folder that is not there": ("bench", "/nonexistent"),
    "a folder that is none": ("bench", "--folder", "README.md"),
    "two folders": ("bench", ".", "--folder", "."),
    "a picture that cannot be": ("bench", ".", "--plot", "/nonexistent/x.png"),
    "a prediction of nothing": ("bench", "--offload=7B"),
    "a format that is none": ("convert", "README.md", "x", "--to=many"),
    "a limit that is none": ("convert", "README.md", "x", "--max-shard=many"),
    "a number below zero": ("bench", ".", "--warmup-loops=-1"),
    "nothing to move": ("bench", ".", "--io-size=0"),
    "two ways to name folders": ("bench", "--folder=.", "--folder-to-device-mapping=.:0"),
    "a mapping that is none": ("bench", "--folder-to-device-mapping=docs:first"),
    "a mapping of nothing": ("bench", "--folder-to-device-mapping=/nonexistent:0"),
    "a memory that is none": ("bench", ".", "--memory=pinned"),
    "an engine that is none": ("bench", ".", "--engine=torch_fastio"),
    "an option of another engine": ("bench", ".", "--engine=files", "--io-parallel=2"),
    "parameters that are none": ("bench", ".", "--offload=many"),
    "a size too small": ("tune", "/", "--io-size", "1M"),
    "nothing left to do": ("tune", "/", "--no-read", "--no-write"),
    "a sweep that is not there": ("tune", "/", "--sweep-config", "/nonexistent"),
    "a device for a folder": ("tune", "/dev/null"),
    "a missing value": ("bench", ".", "--io-size"),
    "a value too many": ("ls", ".", "--json=3"),
    "an argument too many": ("report", ".", "another"),
}


@pytest.mark.parametrize("arguments", PROBLEMS.values(), ids=PROBLEMS)
def test_all_problems_are_told_in_one_style(arguments: tuple[str, ...]) -> None:
    """A line for each, which begins with the command and names the argument; no box, no traceback."""
    done = run(*arguments, expect=2)
    assert done.stdout == ""
    command = "tensorferry" if arguments[0] == "fly" else f"tensorferry {arguments[0]}"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command}: ")
    names = re.findall(r"--[a-z-]+|\b[A-Z]{4,}\b", line) or [arguments[-1]]
    for name in names:
        named = name in " ".join(arguments) or name in help_of(arguments[0])
        assert named, line


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal_and_wraps_only_there(command: str, width: int) -> None:
    lines = help_of(*command.split(), width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert not any(line.endswith("...") or "…" in line for line in lines[1:]), "nothing is cut off"
    # The lines of a paragraph are full: the first word of the next line would not have fitted.
    first = next(n for n, line in enumerate(lines) if line.startswith("  "))
    for line, after in itertools.pairwise(lines[first : lines.index("", first)]):
        assert len(line) + 1 + len(after.split()[0]) > min(width, 100) - 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with something to list."""
    save_file({"x": numpy.zeros(3)}, tmp_path / "x.safetensors")
    return tmp_path


@pytest.mark.parametrize("arguments", [("ls", "."), ("ls", "--help"), ("--version",)])
def test_output_that_cannot_be_written_is_told(arguments: tuple[str, ...], folder: Path) -> None:
    command = ["sh", "-c", 'exec "$@" > /dev/full', "sh", warm.python(), "-m", "tensorferry"]
    (complaint,) = ended(*command, *arguments, cwd=folder, expect=1).stderr.splitlines()
    assert complaint.endswith(": its output cannot be written: No space left on device")


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.ENOSPC])
def test_an_error_without_a_file_name_is_not_taken_for_one_of_the_output(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @reporting_failures("command")
    def command() -> None:
        print("output")
        raise OSError(number, os.strerror(number))

    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == 1
    output, complaint = capsys.readouterr()
    assert output == "output\n"
    assert complaint == f"command: [Errno {number}] {os.strerror(number)}\n"


def test_a_refusal_is_told_though_the_output_cannot_be_written() -> None:
    program = """
from tensorferry.cli.exit_codes import ExitError, reporting_failures
with reporting_failures("this"):
    print("output")
    raise ExitError(2, ["refused"])
"""
    python = ["env", "-u", "PYTHONUNBUFFERED", sys.executable]  # the error comes with the flush
    command = ["sh", "-c", 'exec "$@" > /dev/full', "sh", *python, "-c", program]
    assert ended(*command, expect=2).stderr == "this: refused\n"


@pytest.mark.parametrize("arguments", [("ls", "."), ("fly",)])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_ends_as_any_other(
    arguments: tuple[str, ...], closed: str, folder: Path
) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "tensorferry"]
    ended(*command, *arguments, cwd=folder, expect=2 if arguments == ("fly",) else 0)


def test_who_has_seen_enough_of_its_output_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [warm.python(), "-m", "tensorferry", "bench", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_looking_at_checkpoints_imports_nothing_that_measures(command: str) -> None:
    program = f"""
import sys
from tensorferry.cli.app import run
try:
    run([{command!r}, "--help"])
except SystemExit:
    pass
heavy = ("torch", "numpy", "multiprocessing", "tensorferry.tuning", "rich.progress", "asyncio")
print([name for name in sys.modules if name.startswith(heavy)], file=sys.stderr)
"""
    assert ended(sys.executable, "-c", program).stderr == "[]\n"


def test_a_signal_that_was_ignored_from_the_start_stays_ignored() -> None:
    """As under nohup: the loss of the terminal must not end the command."""
    program = """
import os, signal
from tensorferry.cli.exit_codes import reporting_failures
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with reporting_failures("this"):
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
"""
    assert ended(sys.executable, "-c", program).stdout == "goes on\n"


@pytest.mark.parametrize(
    ("missing", "arguments", "package"),
    [
        ("typer", [], "'tensorferry[cli]'"),
        ("rich", [], "'tensorferry[cli]'"),
        ("torch", ["convert", "x", "y"], "torch"),
    ],
)
def test_without_its_libraries_it_says_what_to_install(
    missing: str, arguments: list[str], package: str
) -> None:
    program = f"""
import sys
sys.argv[1:] = {arguments!r}
from tensorferry.cli import main

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
main()
"""
    complaint = ended(sys.executable, "-c", program, expect=1).stderr
    assert f"needs {missing}" in complaint
    assert f"pip install {package}\n" in complaint
