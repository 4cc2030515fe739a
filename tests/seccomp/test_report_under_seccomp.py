"""`tensorferry report` under seccomp filters that forbid io_uring, or io_uring and Linux AIO."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import child, libraries, required

if TYPE_CHECKING:
    import pathlib

LOOK = "tests.tuning.report_programs:look"


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the report has no libraries to wait for."""
    return libraries.broken(tmp_path_factory.mktemp("libraries"))


def under_seccomp(*groups: str) -> list[str]:
    required.module("pyseccomp")
    blocked = [word for group in groups for word in ("--block", group)]
    return [sys.executable, "-m", "tests.support.seccomp", *blocked, "--"]


def on_engines(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [advice for advice in facts["advice"] if advice["about"] == "engines"]


def test_where_seccomp_forbids_io_uring_libaio_is_chosen_and_a_profile_is_advised(
    directory: pathlib.Path, environment: dict[str, str]
) -> None:
    facts = child.call(
        LOOK, prefix=under_seccomp("io_uring"), environment=environment, path=directory
    ).result
    assert facts["engines"]["chosen"] == "libaio"
    (advice,) = on_engines(facts)
    assert advice["level"] == "speed"
    assert "seccomp" in advice["finding"]
    assert "Linux AIO" in advice["meaning"]
    assert "security-opt seccomp=" in advice["remedy"]
    assert facts["file_system"]["direct_io"]["works"] is True


def test_where_only_threads_are_left_both_refusals_are_explained(
    directory: pathlib.Path, environment: dict[str, str]
) -> None:
    facts = child.call(
        LOOK, prefix=under_seccomp("io_uring", "aio"), environment=environment, path=directory
    ).result
    assert facts["engines"]["chosen"] == "threads"
    findings = [advice["finding"] for advice in on_engines(facts)]
    assert len(findings) == 2
    assert "io_uring" in findings[0]
    assert "libaio" in findings[1]
