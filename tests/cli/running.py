"""Runs commands as people and scripts do: in this process if nothing depends on it, or in a separate one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import warm
from tests.support.child import ROOT

if TYPE_CHECKING:
    from pathlib import Path

BENCH = [sys.executable, "-m", "tensorferry", "bench"]
Done = subprocess.CompletedProcess[str]


def ended(*command: object, expect: int = 0, cwd: Path = ROOT, **environment: str) -> Done:
    """Run a command without input, and fail unless it ends as expected."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def here(
    main: Any, *arguments: object, expect: int = 0, cwd: Path = ROOT, **environment: str
) -> Done:
    """Run a command line in this process; the processes that it starts are forked from a warm interpreter."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as streams:
        patch.setattr(sys, "executable", warm.python())  # which starts without `environment`
        for name, value in ({"COLUMNS": "120"} | environment).items():
            patch.setenv(name, value)
        patch.chdir(cwd)
        streams.enter_context(contextlib.redirect_stdout(output))
        streams.enter_context(contextlib.redirect_stderr(errors))
        try:
            main([*map(str, arguments)])
            code: Any = 0
        except SystemExit as leaving:
            code = leaving.code or 0
    assert code == expect, output.getvalue() + errors.getvalue()
    return Done([], code, output.getvalue(), errors.getvalue())


def run(*arguments: object, **options: Any) -> Done:
    """Run `tensorferry` with these arguments, here."""
    from tensorferry.cli.app import run as main

    return here(main, *arguments, **options)


def run_fresh(*arguments: object, **options: Any) -> Done:
    """Run it in a fresh interpreter; the processes that it starts are fresh, too."""
    return ended(sys.executable, "-m", "tensorferry", *arguments, **options)


def bench(*arguments: object, **options: Any) -> Done:
    return run("bench", *arguments, **options)


def job_of(*arguments: object) -> Any:
    """Return the job that a command line of `tensorferry bench` asks for."""
    from tensorferry.cli import bench as command

    jobs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure", lambda job: jobs.append(job) or command.Results(job))
        bench(*arguments)
    return jobs[0]
