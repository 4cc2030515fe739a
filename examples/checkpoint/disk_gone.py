"""Train with a mirror, lose the machine with its disk, go on from the bucket on another: all is the same, bit for bit.

    python examples/checkpoint/disk_gone.py s3://bucket/run

Endpoint, credentials and region come from the environment (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ...). The
training of ``killed_at_random.py`` runs through once, without a mirror. A second one is mirrored; when the bucket has
something it is killed (``kill -9``), and its folder removed. What is started then, in an empty folder, finds the newest
checkpoint in the bucket, and goes on from there.
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
    """Go on from the newest checkpoint, of the folder or the bucket, up to a number of steps."""
    torch.set_num_threads(1)
    training = Training()
    more: dict[str, Any] = {"mirror": mirror, "mirror_keep_last": 2} if mirror else {}
    with Checkpoints(directory, keep_last=2, **more) as checkpoints:
        done = checkpoints.restore({"training": training}) or 0
        print(f"{directory.name}: from step {done}", flush=True)
        for step in range(done + 1, steps + 1):
            training.step(step)
            time.sleep(pause)  # a large model's steps take longer
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, {"training": training})
    return {"random": torch.get_rng_state(), **training.model.state_dict()}


def killed(directory: Path, mirror: str, steps: int) -> int:
    """Start a training, kill it when the bucket has more than before, with its folder; return what the bucket has."""
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
    parser.add_argument("mirror", help="an empty place in a bucket: s3://bucket/run")
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
    print("All is the same, bit for bit." if same else "Something differs.")
    return 0 if same and 0 < mirrored < options.steps else 1


if __name__ == "__main__":
    sys.exit(main())
