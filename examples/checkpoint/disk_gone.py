"""Train with a mirror, lose the machine and its disk, and resume from the bucket on another, with identical results.

    python examples/checkpoint/disk_gone.py s3://bucket/run

The endpoint, the credentials and the region are read from the environment (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``,
...). The training of ``killed_at_random.py`` first runs without a mirror and without interruption. A second training
has a mirror. Once the bucket has a checkpoint, it is killed (``kill -9``), and its folder is removed. A third training
starts in an empty folder, finds the newest checkpoint in the bucket, and resumes from there. Its final state must be
identical to that of the first training, bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from killed_at_random import Training

from tensorferry.checkpoint import Checkpoints

SAVE_EVERY = 10


def train(directory: Path, mirror: str | None, steps: int, pause: float) -> dict[str, Any]:
    """Train up to a number of steps, starting from the newest checkpoint in the folder or the bucket."""
    torch.set_num_threads(1)
    training = Training()
    more: dict[str, Any] = {"mirror": mirror, "mirror_keep_last": 2} if mirror else {}
    with Checkpoints(directory, keep_last=2, **more) as checkpoints:
        done = checkpoints.restore(training.state) or 0
        print(f"{directory.name}: from step {done}", flush=True)
        for step in range(done + 1, steps + 1):
            training.step(step)
            time.sleep(pause)  # simulates the longer steps of a large model
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, training.state)
    return {"random": torch.get_rng_state(), **training.model.state_dict()}


def killed(directory: Path, mirror: str, steps: int) -> int:
    """Start a training, kill it once the bucket has a new checkpoint, and remove its folder.

    Return the newest step in the bucket.
    """
    command = [sys.executable, __file__, mirror, f"--train={directory}", f"--steps={steps}"]
    process = subprocess.Popen(command)
    seen = Checkpoints(directory, mirror=mirror)
    before = seen.latest(mirrored=True) or 0
    while process.poll() is None and (seen.latest(mirrored=True) or 0) <= before:
        time.sleep(0.05)
    process.kill()
    process.wait()
    shutil.rmtree(directory)
    return seen.latest(mirrored=True) or 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mirror", help="an empty prefix in a bucket, such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.mirror, options.steps, pause=0.02)
        return 0
    with tempfile.TemporaryDirectory(prefix="tensorferry-example-") as path:
        whole = train(Path(path, "undisturbed"), None, options.steps, pause=0)
        mirrored = killed(Path(path, "killed"), options.mirror, options.steps)
        print(f"killed, and its folder removed; the bucket has step {mirrored}")
        other = train(Path(path, "another machine"), options.mirror, options.steps, pause=0)
    same = all(torch.equal(value, other[name]) for name, value in whole.items())
    print("The results are identical, bit for bit." if same else "The results differ.")
    return 0 if same and 0 < mirrored < options.steps else 1


if __name__ == "__main__":
    sys.exit(main())
