"""The whole suite passes where seccomp forbids io_uring, and where it forbids Linux AIO as well."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from tests.support import child

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 900
PASSED_MIN = 500

FILTERS = {"libaio": ["io_uring"], "threads": ["io_uring", "aio"]}
BLOCKED_ENGINE = {"io_uring": "io_uring", "aio": "libaio"}

# Not what builds the package, nor what runs fio or DeepSpeed's own engine, which are blocked as well, nor the slowest.
LEFT_OUT = [
    *(
        f"checkpoint/test_{name}.py"
        for name in (
            "async_save",
            "byte_identity",
            "crash",
            "example_training",
            "hooks",
            "hostile",
            "metadata",
            "ranges",
            "reshard",
            "savers",
            "verify",
            "versions",
            "writer_options",
            "writer_ranks",
        )
    ),
    "seccomp",
    "packaging",
    "cpp",
    "gpu",
    "standin",
    "cli",
    "deepspeed",
    "tuning",
    "test_benchmarks.py",
    "test_examples.py",
    "test_file_access_examples.py",
    "faults/test_extending.py",
    "faults/test_leaks.py",
    "faults/test_limits.py",
    "faults/test_meetings.py",  # each names its engine
    "faults/test_meetings_files.py",
    "stress",
]


def under_seccomp(engine: str) -> list[str]:
    """Return the command that runs another where engine is the best one left."""
    pytest.importorskip("pyseccomp")
    command = [sys.executable, "-m", "tests.support.seccomp"]
    for group in FILTERS[engine]:
        command += ["--block", group]
    return [*command, "--"]


@pytest.mark.parametrize("engine", FILTERS)
def test_the_best_engine_left_is_chosen_and_the_refusals_name_seccomp_and_a_remedy(
    engine: str, directory: pathlib.Path
) -> None:
    ended = child.call(
        "tests.faults.programs:report_engine", prefix=under_seccomp(engine), directory=directory
    )
    assert ended.result["engine"] == engine
    blocked = {BLOCKED_ENGINE[group] for group in FILTERS[engine]}
    assert set(ended.result["refusals"]) == blocked
    assert set(ended.result["forced"]) == blocked
    assert {name for name, refusal in ended.result["engines"].items() if refusal} == blocked
    for reports in ("refusals", "forced", "engines"):
        for name in blocked:
            reason = ended.result[reports][name]
            assert "seccomp" in reason
            assert ";" in reason, "a reason, then a remedy"
            assert len(reason.split(";")[1]) > 10


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("engine", FILTERS)
def test_the_suite_passes(engine: str, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report.xml"
    command = [*under_seccomp(engine), sys.executable, "-m", "pytest", "tests", "-q"]
    command += ["-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    command += [f"--ignore=tests/{path}" for path in LEFT_OUT]
    command += [f"--junitxml={report}", f"--basetemp={tmp_path / 'suite'}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_TEST_REQ")}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:]
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    print(f"{total - skipped} tests passed on {engine}, {skipped} were skipped")
    assert int(suite.get("failures", 0)) == int(suite.get("errors", 0)) == 0
    assert total - skipped >= PASSED_MIN
