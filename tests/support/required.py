"""What tests need of the machine: missing, they are skipped, or fail where TENSORFERRY_TEST_REQUIRE names it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

VARIABLE = "TENSORFERRY_TEST_REQUIRE"
MEANS = ("engines", "fuse", "mounts", "deepspeed")


def missing(means: str, reason: str) -> NoReturn:
    """Skip the test for want of one of MEANS, or fail it if that is required."""
    if means in required():
        pytest.fail(f"{means} required ({VARIABLE}), but missing: {reason}")
    pytest.skip(reason)


def required() -> set[str]:
    """Return which of MEANS are required."""
    names = set(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := names - set(MEANS):
        raise pytest.UsageError(f"{VARIABLE} takes {', '.join(MEANS)}, not {sorted(unknown)}")
    return names
