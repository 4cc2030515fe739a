"""The whole suite passes under seccomp filters that forbid io_uring, or io_uring and Linux AIO."""

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

# Tests in which the core chooses the engine: files, handles and streams. Layers above do not depend on that choice, and
# all other tests run with each engine outside of this suite.
CHOOSING = [
    "tests/transfers/test_files.py",
    "tests/transfers/test_handles.py",
    "tests/project/test_package.py",
    "tests/transfers/test_streams.py",
]
AT_LEAST = 85 if importlib.util.find_spec("torch") else 70  # of 97; without torch of fewer


def under_seccomp(engine: str) -> list[str]:
    """Return a command prefix that leaves engine as the best available one."""
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
        # A test with the fixture `engine` behaves here as in the main suite.
        [*CHOOSING, "-m", "not engine"],
        tmp_path,
        timeout_s=TIMEOUT_S,
        prefix=under_seccomp(engine),
        environment={required.VARIABLE: ""},
        at_least=AT_LEAST,
    )
