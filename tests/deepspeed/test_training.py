"""ZeRO-3 with NVMe offload in two processes, end to end: the results do not depend on the engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import ROOT
from tests.support import warm
from tests.support.ranks import MAX_MEETINGS, NOT_MET

if TYPE_CHECKING:
    import pathlib

    from tests.deepspeed.conftest import Environment

SERVED = {"TENSORFERRY_DEEPSPEED": "1"}
STEPS = 3


def train(directory: pathlib.Path, environment: Environment, **arguments: Any) -> dict[str, Any]:
    """Run tests/deepspeed/training.py in two processes, and return rank 0's result."""
    launcher = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher.append(f"--log-dir={directory}.logs")  # the default is in /tmp and is never removed
    plain = {"directory": str(directory), "steps": STEPS, "sequence": 8} | arguments
    for _ in range(MAX_MEETINGS):
        done = subprocess.run(
            [*launcher, "-m", "tests.deepspeed.training", json.dumps(plain)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if done.returncode == 0 or NOT_MET not in done.stdout:
            break
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    assert done.returncode == 0, done.stdout[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "both", "aio": {"block_size": 262144, "intra_op_parallelism": 2}},
        {"offload": "parameters", "evaluate": True, "dtype": "bfloat16", "aio": {"queue_depth": 4}},
    ],
    ids=["training", "inference"],
)
def test_losses_are_those_of_deepspeeds_own_engine_bit_for_bit(
    own_engine: Environment, directory: pathlib.Path, options: dict[str, Any]
) -> None:
    theirs = train(directory / "theirs", own_engine, **options)
    ours = train(directory / "ours", own_engine | SERVED, **options)
    assert (ours.pop("served_by"), theirs.pop("served_by")) == ("tensorferry", "async_io")
    assert ours == theirs
    assert ours["swapped_nbytes"] > 4 << 20
    if "evaluate" not in options:
        first, *_, last = map(float.fromhex, ours["losses"])
        assert last < first


def test_inference_from_nvme_computes_what_it_does_in_memory(
    newest: Environment, directory: pathlib.Path
) -> None:
    in_memory = train(directory, newest | SERVED, offload="nothing", evaluate=True)
    offloaded = train(directory, newest | SERVED, offload="parameters", evaluate=True)
    assert in_memory["swapped_nbytes"] == 0
    assert offloaded["swapped_nbytes"] > 4 << 20
    assert offloaded["losses"] == in_memory["losses"]
