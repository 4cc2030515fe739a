"""DeepSpeed in its two versions, and its own engine to compare with.

DeepSpeed changes the process that imports it, so only child processes do.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

EXTENSIONS = ROOT / "build" / "torch_extensions"
OLD = ROOT / "build" / "deepspeed-0.18.2"

Environment = dict[str, str]

# The start of a command that may lock no memory, not even as root.
LOCK_NOTHING = [
    *(["setpriv", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []),
    *["prlimit", "--memlock=0:0"],
]


def can_forbid_locking() -> bool:
    return all(shutil.which(command) for command in LOCK_NOTHING if not command.startswith("--"))


@pytest.fixture
def newest() -> Environment:
    """The environment of a child that imports the newest DeepSpeed; torch compiles nothing in it unnoticed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (make deepspeed)")
    return {"TENSORFERRY_DEEPSPEED": "0", "CXX": "false", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(params=["newest", "0.18.2"])
def version(request: pytest.FixtureRequest, newest: Environment) -> Environment:
    """The same for each version of DeepSpeed."""
    if request.param == "newest":
        return newest
    if not (OLD / "deepspeed").is_dir():
        pytest.skip(f"{OLD.name} is not installed (make deepspeed)")
    return newest | {"PYTHONPATH": str(OLD)}


@pytest.fixture(scope="session")
def own_engine() -> Environment:
    """The environment in which the newest DeepSpeed uses its own engine, compiled once and kept in build/."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (make deepspeed)")
    environment = {
        "TENSORFERRY_DEEPSPEED": "0",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja is there
        "DS_ACCELERATOR": "cpu",
    }
    # Who is stopped while compiling leaves a file that torch would wait for; here only one compiles at a time.
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    with open(EXTENSIONS / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in EXTENSIONS.glob("*/lock"):
            left.unlink()
        return _compiled(environment)


def _compiled(environment: Environment) -> Environment:
    program = "import deepspeed.ops.op_builder as b; b.AsyncIOBuilder().load().aio_handle()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    if done.returncode != 0:
        last = done.stdout.strip().rpartition("\n")[2]
        pytest.skip(f"DeepSpeed's own engine does not compile here: {last}")
    return environment
