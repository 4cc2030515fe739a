"""Components of the machine that tests need: without one a test is skipped, or fails if it is required.

TENSORFERRY_TEST_REQUIRE names the required components.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "TENSORFERRY_TEST_REQUIRE"
MEANS = ("engines", "fuse", "mounts", "deepspeed", "tools")


def missing(means: str, reason: str) -> NoReturn:
    """Skip the test because one of MEANS is missing, or fail it if that one is required."""
    if means in required():
        pytest.fail(f"{means} required ({VARIABLE}), but missing: {reason}")
    pytest.skip(reason, allow_module_level=True)


def module(name: str) -> ModuleType:
    """Return a module that `make setup` installs for tests and development: one of the tools."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing("tools", str(error))


def command(name: str) -> str:
    """Return the path of a program that tools/system_packages.sh installs: one of the tools."""
    return shutil.which(name) or missing("tools", f"{name} is not installed")


def required() -> set[str]:
    """Return which of MEANS are required."""
    names = set(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := names - set(MEANS):
        raise pytest.UsageError(f"{VARIABLE} takes {', '.join(MEANS)}, not {sorted(unknown)}")
    return names
