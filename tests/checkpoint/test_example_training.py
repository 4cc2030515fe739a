"""The example: a training killed during a save continues bit for bit, with other numbers of ranks."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import warm
from tests.support.child import ROOT
from tests.support.data import SEED
from tests.support.ranks import MAX_MEETINGS, NOT_MET

if TYPE_CHECKING:
    import pathlib

    from tests.support.buckets import Bucket


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="the example's FSDP came with torch 2.7")
def test_training_killed_in_a_save_goes_on_with_one_rank_and_with_three(
    directory: pathlib.Path,
) -> None:
    program = ROOT / "examples" / "checkpoint" / "killed_and_resumed.py"
    for _ in range(MAX_MEETINGS):
        done = subprocess.run(
            [warm.python(), program, f"--directory={directory}"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if NOT_MET not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses are identical, bit for bit." in done.stdout
    # The files of the killed save were present, in addition to those of the previous checkpoint.
    assert done.stdout.count(".distcp") > 2
    assert list(directory.iterdir()) == []


def test_training_killed_at_random_moments_ends_the_same(directory: pathlib.Path) -> None:
    program = ROOT / "examples" / "checkpoint" / "killed_at_random.py"
    done = subprocess.run(
        [warm.python(), program, f"--directory={directory}", "--kills=3", f"--seed={SEED}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The results are identical, bit for bit." in done.stdout
    assert "killed or preempted 3 times of 3" in done.stdout
    assert "preempted; checkpoints" in done.stdout
    assert list(directory.iterdir()) == []


def test_training_whose_disk_has_gone_goes_on_from_the_bucket(bucket: Bucket) -> None:
    program = ROOT / "examples" / "checkpoint" / "disk_gone.py"
    done = subprocess.run(
        [warm.python(), program, bucket.url("run")],
        env=os.environ | bucket.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed, and its folder removed; the bucket has step" in done.stdout
    assert "another machine: from step 0" not in done.stdout
    assert "The results are identical, bit for bit." in done.stdout
