"""Trainings with a mirror, and checks of its bucket after the training and its files are gone.

`python -m tests.checkpoint.mirrors KILLS [FIRST]` repeats KILLS times: kill a training and its mirror at a random
moment, remove the local files, and restore from the bucket alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import Checkpoints
from tests.checkpoint.states import steps_in
from tests.support import buckets, warm
from tests.support.buckets import Bucket
from tests.support.child import ROOT
from tests.support.data import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.checkpoint.mirror.mirror import Mirror

PREFIX = "runs/one"
SMALL, TWO_PARTS, LARGE = 1000, 5 << 19, 5 << 20  # elements; the large one needs three parts


def state_of(step: int, numbers: int = SMALL) -> dict[str, Any]:
    """Return a state in which every value is the step."""
    return {"weights": torch.full((numbers,), float(step)), "step": step}


def mirrored(
    root: pathlib.Path | str,
    bucket: Bucket,
    *,
    retries: int = 1,
    keeps_leftovers: bool = False,
    **options: Any,
) -> Checkpoints:
    """Return checkpoints with a mirror that removes leftovers of any age.

    The age is negative, because the times of objects in stores are in whole seconds.
    """
    checkpoints = Checkpoints(root, mirror=(bucket.store(retries=retries), PREFIX), **options)
    if not keeps_leftovers:
        mirror_of(checkpoints)._settings["leftover_age"] = -5
    return checkpoints


def mirror_of(checkpoints: Checkpoints) -> Mirror:
    assert checkpoints._mirror is not None
    return checkpoints._mirror


def folder_of(step: int) -> str:
    return f"{PREFIX}/step_{step:08d}"


def data_in(bucket: Bucket) -> list[str]:
    """Return the keys of data files."""
    return [key for key in bucket.keys(PREFIX) if key.endswith(".distcp")]


def whole_steps(bucket: Bucket, numbers: int = SMALL) -> list[int]:
    """Load each valid checkpoint in the bucket with torch's reader, and return their steps."""
    found = []
    for key in bucket.keys(PREFIX):
        folder, _, name = key.rpartition("/")
        if name != ".metadata":
            continue
        state = state_of(-1, numbers)
        with tempfile.TemporaryDirectory() as copy:
            for each in bucket.keys(folder):
                pathlib.Path(copy, each.rpartition("/")[2]).write_bytes(bucket.read(each))
            dcp.load(state, storage_reader=dcp.FileSystemReader(copy), no_dist=True)
        (step,) = steps_in(state)
        assert folder == folder_of(int(step))
        found.append(int(step))
    return found


def process_of(checkpoints: Checkpoints) -> int:
    """Return the mirror's process."""
    process = mirror_of(checkpoints)._process
    assert process is not None
    return process.pid


def has_ended(process: int) -> bool:
    """Return whether a process has ended, also if it is a zombie that its parent has not awaited."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except FileNotFoundError:
        return True


@contextlib.contextmanager
def training(root: pathlib.Path, bucket: Bucket, numbers: int) -> Iterator[subprocess.Popen[str]]:
    """Run `train` in a process that reports its progress; kill it at the end."""
    program = f"from tests.checkpoint.mirrors import train; train({str(root)!r}, {numbers})"
    process = subprocess.Popen(
        [warm.python(), "-c", program],
        cwd=ROOT,
        env=os.environ | bucket.environment() | {"MIRROR": bucket.name, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def train(root: str, numbers: int) -> None:
    """Restore, and save for ever."""
    bucket = Bucket(os.environ["MIRROR"], os.environ["AWS_ENDPOINT_URL"])
    checkpoints = mirrored(root, bucket, keep_last=2, mirror_keep_last=2)
    state = state_of(-1, numbers)
    done = checkpoints.restore(state) or 0
    say("restored", done, *steps_in(state))
    for step in itertools.count(done + 1):
        checkpoints.save(step, state_of(step, numbers), wait=True)
        process = mirror_of(checkpoints)._process  # None: it was killed a moment ago
        say("saved", step, process.pid if process else 0)
        if step % 4 == 0:
            checkpoints.wait(mirrored=True)
            say("mirrored", step)


def say(*words: object) -> None:
    print(*words, flush=True)


def heard(output: IO[str] | None, word: str) -> list[int]:
    """Return the numbers of the next line that begins with a word."""
    assert output is not None
    for line in output:
        first, *numbers = line.split()
        if first == word:
            return [int(float(each)) for each in numbers]
    raise AssertionError(f"it ended before it said {word!r}")


def killed(bucket: Bucket, directory: pathlib.Path, choices: random.Random, before: int) -> int:
    """Train on an empty disk from the bucket, kill the training, and return the newest complete step in the bucket."""
    root = directory / "run"
    with training(root, bucket, TWO_PARTS) as process:
        done, *values = heard(process.stdout, "restored")
        assert done == before, (done, before, whole_steps(bucket, TWO_PARTS))
        assert values == [done or -1]
        _, mirror = heard(process.stdout, "saved")
        time.sleep(choices.uniform(0, 2))
        both = [mirror, process.pid]
        choices.shuffle(both)
        for each in both[: choices.choice([1, 2, 2])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
            time.sleep(choices.choice([0, 0, 0.2]))
        process.kill()
        said = [line.split() for line in process.communicate()[0].split("\n")]
    for each in {mirror, *(int(words[2]) for words in said if words[:1] == ["saved"])} - {0}:
        while not has_ended(each):
            time.sleep(0.01)
    shutil.rmtree(root)
    steps = whole_steps(bucket, TWO_PARTS)
    known = [int(words[1]) for words in said if words[:1] == ["mirrored"]]
    assert max(steps, default=0) >= max([before, *known]), (steps, before, known)
    return max(steps, default=0)


def main(kills: int, first: int = 0) -> None:
    with buckets.s3_server() as address, tempfile.TemporaryDirectory() as directory:
        bucket, newest, grew = Bucket.new(address), 0, 0
        for number in range(first, first + kills):
            choices = random.Random(f"{SEED} mirror {number}")
            before = newest
            newest = killed(bucket, pathlib.Path(directory), choices, before)
            grew += newest > before
            print(f"kill {number}: whole and newest: step {newest}", flush=True)
        print(f"{kills} kills, {grew} with newer checkpoints; left: {bucket.keys(PREFIX)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
