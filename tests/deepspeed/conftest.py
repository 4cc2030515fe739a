"""DeepSpeed in its two versions.

DeepSpeed changes the process that imports it, so only child processes do.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import ROOT
from tests.support import required

OLD = ROOT / "build" / "deepspeed-0.18.2"

Environment = dict[str, str]


@pytest.fixture
def lock_nothing() -> list[str]:
    """The start of a command that may lock no memory, not even as root."""
    root = [required.command("setpriv"), "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []
    return [*root, required.command("prlimit"), "--memlock=0:0"]


@pytest.fixture(params=["newest", "0.18.2"])
def version(request: pytest.FixtureRequest, newest: Environment) -> Environment:
    """The environment of a child that imports a version of DeepSpeed, for each of them."""
    if request.param == "newest":
        return newest
    if not (OLD / "deepspeed").is_dir():
        required.missing("deepspeed", f"{OLD.name} is not installed (make deepspeed)")
    return newest | {"PYTHONPATH": str(OLD)}
