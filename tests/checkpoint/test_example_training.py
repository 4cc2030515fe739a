"""The example: training killed in the middle of a save goes on, bit for bit, with other numbers of ranks."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import warm
from tests.support.child import ROOT

if TYPE_CHECKING:
    import pathlib


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="the example's FSDP came with torch 2.7")
def test_training_killed_in_a_save_goes_on_with_one_rank_and_with_three(
    directory: pathlib.Path,
) -> None:
    done = subprocess.run(
        [
            warm.python(),
            ROOT / "examples" / "checkpoint" / "killed_and_resumed.py",
            f"--directory={directory}",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses are the same, bit for bit." in done.stdout
    # What the killed save had begun was there, beside the checkpoint before.
    assert done.stdout.count(".distcp") > 2
    assert list(directory.iterdir()) == []
