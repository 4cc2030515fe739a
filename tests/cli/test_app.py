"""The command line as a whole: what it offers, how it ends, what it needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tensorferry

pytest.importorskip("typer")
pytest.importorskip("rich")

COMMANDS = ("report", "bench", "tune")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorferry", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "120"},
    )


def test_help_lists_the_commands_without_control_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = run(command, "-h")
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    assert len(done.stdout) > 300


def test_it_tells_its_version() -> None:
    assert run("--version").stdout == f"tensorferry {tensorferry.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [("fly",), ("report", "--wings"), ("bench", "--wings"), ("tune", "--wings")]
)
def test_what_it_does_not_know_is_a_bad_argument(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr
    assert "Traceback" not in done.stderr


def test_options_may_be_written_with_underscores() -> None:
    hyphens, underscores = (
        run("bench", option, "x", "--folder", "/nonexistent")
        for option in ("--block-size", "--block_size")
    )
    assert "No such option" not in underscores.stderr
    assert (underscores.returncode, underscores.stderr) == (hyphens.returncode, hyphens.stderr)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_it_says_what_to_install(missing: str) -> None:
    program = f"""
import sys
from tensorferry.cli import main

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"needs {missing}" in done.stderr
    assert "pip install 'tensorferry[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_does_not_import_its_command_line() -> None:
    program = (
        "import sys, tensorferry; "
        "heavy = [name for name in sys.modules if name.startswith(('tensorferry.cli', 'tensorferry.tuning'))]; "
        "assert not heavy, heavy"
    )
    # A profile on this machine would be reason enough to look at it.
    environment = os.environ | {"TENSORFERRY_PROFILES": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
