"""What needs a GPU passes on the stand-in driver's, with every engine."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from tests.support import standin

ROOT = pathlib.Path(__file__).parents[2]
SUITES = ["tests/gpu", "tests/standin/driver"]
TIMEOUT_S = 500
PASSED_MIN = 280  # all of them skipped would prove nothing


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_suite_passes(engine: str, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *SUITES, "-q"]
    command += ["-p", "no:cacheprovider", "--timeout", "60"]
    command += [f"--junitxml={report}", f"--basetemp={tmp_path / 'suite'}"]
    # Torch must not meet a real driver in a process whose core has met another.
    environment = standin.environment() | {"TENSORFERRY_ENGINE": engine, "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as expired:
        output = (expired.output or b"").decode(errors="replace")
        raise AssertionError(f"no end in {TIMEOUT_S} s:\n{output[-20_000:]}") from expired
    assert ended.returncode == 0, ended.stdout[-20_000:]
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    passed = int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
    print(f"{passed} tests passed on {engine}, {suite.get('skipped')} were skipped")
    assert passed >= PASSED_MIN, ended.stdout[-20_000:]
