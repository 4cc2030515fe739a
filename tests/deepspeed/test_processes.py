"""Processes that get our ops without a call of install(): by the environment variable, and by running under us."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT
from tests.support import warm
from tests.support.warm import call

if TYPE_CHECKING:
    import pathlib

    from tests.deepspeed.conftest import Environment

PROGRAMS = "tests.deepspeed.programs"
STARTED = "import sys; print(sorted(m for m in sys.modules if 'ferry' in m))"


def python(
    *arguments: str | pathlib.Path, environment: Environment, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable if fresh else warm.python(), *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_the_variable_interpreters_start_as_ever() -> None:
    for value in ("0", ""):
        started = python("-c", STARTED, environment={"TENSORFERRY_DEEPSPEED": value}, fresh=True)
        assert "_tensorferry_startup" not in started.stdout
        assert started.stderr == ""


def test_the_variable_imports_nothing_of_tensorferry_before_deepspeed_is() -> None:
    started = python("-c", STARTED, environment={"TENSORFERRY_DEEPSPEED": "1"}, fresh=True)
    assert "'_tensorferry_startup'" in started.stdout
    assert "'tensorferry'" not in started.stdout
    assert started.stderr == ""


def test_the_variable_reaches_spawned_processes(version: Environment) -> None:
    environment = version | {"TENSORFERRY_DEEPSPEED": "1"}
    ended = call(
        f"{PROGRAMS}:engine_in_a_spawned_process", environment=environment, call_install=False
    )
    assert ended.result == ["tensorferry", "tensorferry"]


def test_install_reaches_processes_spawned_later(newest: Environment) -> None:
    ended = call(f"{PROGRAMS}:engine_in_a_spawned_process", environment=newest, call_install=True)
    assert ended.result == ["tensorferry", "tensorferry"]


def test_deepspeed_without_us_is_left_alone(newest: Environment) -> None:
    ended = call(f"{PROGRAMS}:engine_in_a_spawned_process", environment=newest, call_install=False)
    assert ended.result == ["deepspeed", "deepspeed"]


def test_an_import_of_deepspeed_that_fails_can_be_tried_again(newest: Environment) -> None:
    program = (
        "import sys\n"
        "sys.modules['deepspeed.ops'] = None\n"
        "try: import deepspeed\n"
        "except ImportError: del sys.modules['deepspeed.ops']\n"
        "import deepspeed\n"
        "print(deepspeed.ops.op_builder.AsyncIOBuilder.load.__module__)\n"
    )
    done = python("-c", program, environment=newest | {"TENSORFERRY_DEEPSPEED": "1"})
    assert done.stdout.splitlines()[-1:] == ["tensorferry.deepnvme.builders"], done.stderr


SCRIPT = """
import json, os, sys
import helper
from deepspeed.ops.op_builder import AsyncIOBuilder
print(json.dumps([__name__, sys.argv[1:], os.path.basename(__file__), AsyncIOBuilder.load.__module__]))
sys.exit(7)
"""


def test_scripts_and_modules_run_under_us_as_under_python(
    newest: Environment, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    expected = '["__main__", ["-m", "--flag"], "script.py", "tensorferry.deepnvme.builders"]'
    run = ("-m", "tensorferry.deepspeed")
    as_script = python(*run, tmp_path / "script.py", "-m", "--flag", environment=newest)
    assert (as_script.returncode, as_script.stdout.splitlines()[-1:]) == (7, [expected])
    environment = newest | {"PYTHONPATH": str(tmp_path)}
    as_module = python(*run, "-m", "script", "-m", "--flag", environment=environment)
    assert (as_module.returncode, as_module.stdout.splitlines()[-1:]) == (7, [expected])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "usage"),
        (["-m"], 2, "usage"),
        (["--wrong"], 2, "usage"),
        (["missing.py"], 2, "missing.py"),
        (["--help"], 0, ""),
    ],
)
def test_bad_command_lines_are_refused(
    newest: Environment, arguments: list[str], status: int, message: str
) -> None:
    done = python("-m", "tensorferry.deepspeed", *arguments, environment=newest, fresh=True)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
