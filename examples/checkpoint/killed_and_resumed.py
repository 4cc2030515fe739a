"""Kill a training in the middle of a save, resume it with other numbers of ranks, and compare the losses bit for bit.

    python examples/checkpoint/killed_and_resumed.py

A small transformer is trained with FSDP2 on two processes (``train.py``), first without interruption. A second training
overwrites its only checkpoint every few steps, and in the middle of one of these saves a rank is killed (``kill -9``).
The directory then still has the complete previous checkpoint. From there, the training is resumed with one process, and
with three.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("train.py")


def train(
    ranks: int, directory: Path, *arguments: object, killed: bool = False
) -> dict[int, float]:
    """Train with a number of processes, and return the loss of each step."""
    losses = directory.with_suffix(".losses")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", f"--log-dir={directory}.logs"]
    command += [TRAIN, "--directory", directory, "--losses", losses]
    done = subprocess.run(
        [str(part) for part in (*command, *arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if not ("SIGKILL" in done.stderr if killed else done.returncode == 0):
        raise SystemExit(
            f"training with {ranks} ranks ended with {done.returncode}:\n{done.stderr}"
        )
    lines = losses.read_text().splitlines()
    return dict(map(json.loads, lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--directory", type=Path, help="the working directory (default: a temporary one)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tensorferry-example-", dir=options.directory) as path:
        return compare(Path(path))


def compare(base: Path) -> int:
    """Run all trainings, compare their losses, and return the exit code."""
    console = Console()
    console.print("training with 2 ranks, without interruption ...")
    reference = train(2, base / "reference", "--steps=12")
    console.print("training with 2 ranks, killed in the save of step 8 ...")
    killed = train(2, base / "killed", "--steps=12", "--die-in-save-of-step=8", killed=True)
    left = sorted(path.name for path in (base / "killed").iterdir())
    console.print(f"left in the directory: {', '.join(left)}")
    resumed = {}
    for ranks in (1, 3):
        console.print(f"resuming with {ranks} rank{'s' if ranks > 1 else ''} ...")
        shutil.copytree(base / "killed", base / f"resumed{ranks}")
        resumed[ranks] = train(ranks, base / f"resumed{ranks}", "--steps=12")

    table = Table("step", "uninterrupted", "killed", "resumed with 1", "resumed with 3")
    for step, loss in reference.items():
        others = (killed.get(step), resumed[1].get(step), resumed[3].get(step))
        table.add_row(str(step), f"{loss:.9f}", *("" if x is None else f"{x:.9f}" for x in others))
    console.print(table)
    continued = {step: loss for step, loss in reference.items() if step > 4}
    if all(losses == continued for losses in resumed.values()):
        console.print("The losses are identical, bit for bit.")
        return 0
    console.print("The losses differ.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
