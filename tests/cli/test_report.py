"""`tensorferry report`, run as people and scripts run it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tensorferry.cli import report as command
from tensorferry.tuning.report import report as collect
from tests.cli.running import run, run_fresh
from tests.support import commands, libraries, processes, required, standin
from tests.support.leaks import settled

if TYPE_CHECKING:
    from pathlib import Path

required.module("typer")
required.module("rich")

# Libraries with slow imports give time to interrupt.
SLOW_IMPORT = "import time; open(__file__ + '.begun', 'x').close(); time.sleep(60)"


def report(*arguments: object, **options: Any) -> str:
    """Run the report in a fresh interpreter, because it starts copies of its interpreter; return its output."""
    done = run_fresh("report", *arguments, **options)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with broken installations of torch and DeepSpeed, which fail at once."""
    return libraries.broken(tmp_path_factory.mktemp("libraries"))


def test_json_has_the_facts_and_the_advice_on_the_working_folder(
    tmpfs_directory: Path, quick: dict[str, str]
) -> None:
    facts: dict[str, Any] = json.loads(report("--json", cwd=tmpfs_directory, **quick))
    assert facts["path"] == str(tmpfs_directory)
    assert facts["file_system"]["direct_io"]["works"] is False
    assert "file_system" in [advice["about"] for advice in facts["advice"]]
    printed = report(tmpfs_directory, **quick)
    assert "\x1b" not in printed
    for name in ("versions", "engine", "file system", "memory", "limits", "GPU", "advice"):
        assert f"\n{name}" in printed
    for advice in facts["advice"]:
        assert set(advice) == {"level", "about", "finding", "meaning", "remedy"}
        for text in (advice["finding"], advice["meaning"], advice["remedy"]):
            assert text in printed, "the text says the same, in lines that can be copied"


def test_it_says_whether_cuda_tensors_can_be_moved_and_how(
    directory: Path, quick: dict[str, str]
) -> None:
    printed = report(directory, **quick | standin.environment())
    assert re.search(r"^GPU +usable$", printed, re.MULTILINE)
    assert re.search(r"^GDS +native, .*, nvidia-fs ", printed, re.MULTILINE)
    nowhere = {"TENSORFERRY_LIBCUDA": "/nonexistent/libcuda.so.1"}
    printed = report(directory, **quick | nowhere)
    assert re.search(r"^GPU .*/nonexistent/", printed, re.MULTILINE)
    assert "\nGDS" not in printed
    nowhere = standin.environment() | {"TENSORFERRY_LIBCUFILE": "/nonexistent/libcufile.so.0"}
    printed = report(directory, **quick | nowhere)
    assert re.search(r"^GPU +usable$", printed, re.MULTILINE)
    assert re.search(r"^GDS .*/nonexistent/libcufile", printed, re.MULTILINE)


def test_it_is_coloured_on_a_terminal(directory: Path, quick: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tensorferry", "report", str(directory)]
    environment = os.environ | quick | {"TERM": "xterm", "COLUMNS": "80"}
    shown = commands.on_terminal(command, env=environment)
    assert b"\x1b[1mengine " in shown


def test_facts_that_could_not_be_determined_are_told_with_the_reason(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = {"unknown": "the machine hides it"}
    facts: dict[str, Any] = dict.fromkeys(("devices", "limits", "file_system"), unknown)
    facts["engines"] = {"chosen": unknown, "forced": None, "available": {}}
    facts["system"] = dict.fromkeys(("available_nbytes", "transparent_huge_pages"), unknown)
    facts["gpu"] = {"cuda": unknown, "cufile": unknown}
    facts["libraries"] = {"torch": unknown, "deepspeed": unknown}
    facts |= {"path": str(directory), "versions": {"torch": unknown}, "advice": []}
    monkeypatch.setattr("tensorferry.tuning.report.report", lambda _: facts)
    printed = run("report", directory).stdout
    for name in ("engine", "file system", "devices", "memory", "limits", "GPU"):
        assert re.search(rf"^{name} +unknown: the machine hides it", printed, re.MULTILINE)
    assert "no advice" in printed


@pytest.mark.parametrize("columns", [None, 80])
def test_it_fits_on_a_screen_whatever_is_to_be_told(
    columns: int | None,
    directory: Path,
    quick: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most important advice is shown; the rest is counted."""
    advice = {"level": "hint", "about": "devices", "finding": "f " * 70, "meaning": "m " * 70}
    items = [advice | {"remedy": f"remedy {number}"} for number in range(30)]
    drive = {"name": "sda", "number": "8:0", "kind": "SCSI or SATA disk", "model": None}
    for name, value in quick.items():
        monkeypatch.setenv(name, value)
    facts = collect(directory) | {"advice": items, "devices": [drive] * 40}
    facts["limits"] = [{"device": f"8:{number}", "rbps": 1} for number in range(99)]
    monkeypatch.setattr("tensorferry.tuning.report.report", lambda _: facts)
    if columns is not None:
        monkeypatch.setattr(
            command,
            "make_console",
            lambda: Console(width=columns, force_terminal=True, file=sys.stdout),
        )
    lines = run("report", directory).stdout.splitlines()
    assert 30 < len(lines) <= 49
    assert "remedy 0" in "".join(lines)
    assert re.match(r"\d+ more: --json has all", lines[-1])
    assert any("and 34 more devices" in line for line in lines)
    if columns is not None:
        plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
        assert max(map(len, plain)) <= columns


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_exits_with_130_and_leaves_no_process(
    number: signal.Signals, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("libraries")
    variables = libraries.broken(folder, SLOW_IMPORT)
    variable = "PYTHONPATH=" + variables["PYTHONPATH"]
    command = [sys.executable, "-m", "tensorferry", "report", str(directory)]
    environment = os.environ | variables
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert settled(lambda: len(list(folder.glob("*.begun"))) == 2)
    assert len(processes.with_variable(variable)) >= 3
    child.send_signal(number)
    _, complaints = child.communicate(timeout=300)
    assert child.returncode == 130
    assert "Traceback" not in complaints
    assert processes.with_variable(variable) == []
