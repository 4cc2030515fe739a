"""Runs a part of the suite in a separate process: under seccomp, or on the stand-in driver."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree
from typing import TYPE_CHECKING

from tests.support import effort

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]


def assert_passes(
    arguments: Sequence[str],
    scratch: pathlib.Path,
    *,
    timeout_s: float,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str],
    at_least: int,
    share: float = 0.25,
) -> None:
    """Run pytest with arguments; fail unless at least so many tests pass, and all others are skipped.

    It draws a share of the examples, because the main suite draws all of them.
    """
    report = scratch / "report.xml"
    command = [*prefix, sys.executable, "-X", "faulthandler", "-m", "pytest", *arguments, "-q"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--junitxml={report}", f"--basetemp={scratch / 'suite'}"]
    # The inner suite is one test of the outer one. Without these variables it does not take itself for an xdist worker.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    inherited[effort.VARIABLE] = str(effort.EFFORT * share)
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=inherited | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as expired:
        output = (expired.output or b"").decode(errors="replace")
        raise AssertionError(f"no end in {timeout_s} s:\n{output[-20_000:]}") from expired
    assert ended.returncode == 0, ended.stdout[-20_000:]
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - skipped
    print(f"{passed} tests passed, {skipped} were skipped")
    assert passed >= at_least, ended.stdout[-20_000:]
