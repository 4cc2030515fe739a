"""The whole suite passes where seccomp forbids io_uring, and where it forbids Linux AIO as well."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import child, required, suites

if TYPE_CHECKING:
    import pathlib

TIMEOUT_S = 1500

FILTERS = {"libaio": ["io_uring"], "threads": ["io_uring", "aio"]}
BLOCKED_ENGINE = {"io_uring": "io_uring", "aio": "libaio"}

# What leaves the choice of the engine to the core: files, handles and streams; and what stands on them, which cannot
# know what was chosen, with the last engine that there is. All else runs with each engine elsewhere.
CHOOSING = [
    "tests/transfers/test_files.py",
    "tests/transfers/test_handles.py",
    "tests/project/test_package.py",
    "tests/transfers/test_streams.py",
]
ABOVE = [
    "tests/transfers/test_futures.py",
    "tests/checkpoint/test_reading.py",
    "tests/checkpoint/test_writer.py",
]
SUITES = {"libaio": CHOOSING, "threads": CHOOSING + ABOVE}
TORCH = importlib.util.find_spec("torch") is not None
# Of 97 and 161; without torch of fewer.
AT_LEAST = {"libaio": 85, "threads": 140} if TORCH else {"libaio": 70, "threads": 95}


def under_seccomp(engine: str) -> list[str]:
    """Return the command that runs another where engine is the best one left."""
    required.module("pyseccomp")
    command = [sys.executable, "-m", "tests.support.seccomp"]
    for group in FILTERS[engine]:
        command += ["--block", group]
    return [*command, "--"]


@pytest.mark.parametrize("engine", FILTERS)
def test_the_best_engine_left_is_chosen_and_the_refusals_name_seccomp_and_a_remedy(
    engine: str, directory: pathlib.Path
) -> None:
    ended = child.call(
        "tests.transfers.programs:report_engine", prefix=under_seccomp(engine), directory=directory
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


def test_where_io_uring_is_hidden_as_by_podman_the_refusal_names_it_and_no_old_kernel(
    directory: pathlib.Path,
) -> None:
    prefix = under_seccomp("libaio")
    ended = child.call(
        "tests.transfers.programs:report_engine",
        prefix=[*prefix[:-1], "--errno", "ENOSYS", "--"],
        directory=directory,
    )
    assert ended.result["engine"] == "libaio"
    reason = ended.result["refusals"]["io_uring"]
    assert reason.startswith("io_uring_setup: Function not implemented; ")
    assert "a seccomp profile (Podman's" in reason
    assert "remedy: run the container with a profile that allows io_uring_setup" in reason
    assert "a kernel" not in reason


@pytest.mark.minutes
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("engine", FILTERS)
def test_the_suite_passes(engine: str, tmp_path: pathlib.Path) -> None:
    suites.assert_passes(
        # What names its engine does here what it does anywhere.
        [*SUITES[engine], "-m", "not engine"],
        tmp_path,
        timeout_s=TIMEOUT_S,
        prefix=under_seccomp(engine),
        environment={required.VARIABLE: ""},
        at_least=AT_LEAST[engine],
    )
