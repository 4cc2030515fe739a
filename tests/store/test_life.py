"""Random lives of stores: undisturbed, with interrupts, on drives that fail or are full, and killed."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pathlib
import signal
import sys
import traceback
from typing import Any

import numpy as np
import pytest

import tensorferry.store
from tensorferry.store import TensorStore
from tests.store.life import Life, check_files, sum_of
from tests.support import mounts
from tests.support.effort import examples
from tests.support.faultfs import Fault
from tests.support.interrupts import At

SOURCES = str(pathlib.Path(tensorferry.store.__file__).parent)
FAULTS = ["write", "read", "fsync", "fsyncdir", "fallocate", "open", "flush", "truncate", "rename"]


@pytest.fixture(autouse=True)
def large():
    """In place of the fixture of other tests: the sizes of files are the real ones."""


def kind_of(seed: int) -> dict[str, Any]:
    return {
        "directories": 1 + seed % 3 // 2,
        "temporary": seed % 2 == 0,
        "checksums": seed % 5 != 0,
    }


@pytest.mark.parametrize("seed", range(examples(12)))
def test_undisturbed_lives(tmp_path, seed):
    life = Life(tmp_path, seed, **kind_of(seed))
    life.live(150)
    life.end()


@pytest.mark.parametrize("seed", range(examples(12)))
def test_interrupted_lives(tmp_path, seed, monkeypatch):
    # Otherwise the ignored exception keeps its frames alive, because finalizers cannot raise.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    rng = np.random.default_rng(seed)

    def interrupt():
        raise KeyboardInterrupt

    def failing():
        number = int(rng.integers(1, 500)) if rng.random() < 0.4 else 0
        return At(number, SOURCES, interrupt)

    life = Life(tmp_path, seed, **kind_of(seed))
    life.live(100, failing=failing)
    life.end()
    assert life.failures


@pytest.mark.parametrize("seed", range(examples(6)))
def test_lives_on_a_drive_that_fails(faultfs, seed, monkeypatch):
    monkeypatch.setattr(Life, "map", lambda _: None)  # a drive error would be a SIGBUS
    rng = np.random.default_rng(seed)

    @contextlib.contextmanager
    def failing():
        if rng.random() < 0.6:
            how = {"skip": int(rng.integers(4)), "times": int(rng.choice([1, 2, 1000]))}
            error = int(rng.choice([errno.EIO, errno.ENOSPC]))
            faultfs.order(Fault(str(rng.choice(FAULTS)), error=error, **how))
        try:
            yield
        finally:
            faultfs.clear()

    life = Life(faultfs.path, seed, **kind_of(seed))
    life.live(80, failing=lambda: failing())
    life.end()


@pytest.mark.parametrize("seed", range(examples(9)))
def test_lives_on_a_full_drive(tmp_path, seed):
    with mounts.tmpfs(tmp_path / "tmpfs", (8, 12, 20)[seed % 3] << 20) as root:
        life = Life(root, seed, **kind_of(seed))
        life.live(100, failing=lambda: contextlib.nullcontext())
        life.end()
        life.store = life.mappings = None
        gc.collect()


@pytest.mark.parametrize("seed", range(examples(12)))
def test_killed_lives(tmp_path, seed):
    """Each generation is killed at any moment, and the next one goes on in the same directories."""
    rng = np.random.default_rng(seed)
    kind = kind_of(seed)
    paths = [tmp_path / f"drive{number}" for number in range(kind["directories"])]
    commits: dict[str, Any] = {}
    last = None
    for generation in range(4):
        log = tmp_path / f"log{generation}"
        number = int(rng.integers(1, 12_000))
        if (child := os.fork()) == 0:
            try:
                with At(number, SOURCES, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                    Life(tmp_path, 10 * seed + generation, log=log, **kind).live(10**6)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        entries = (
            [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        )
        commits |= {record: sums for _, what, record, sums in entries if what == "commit"}
        last = check_what_is_left(paths, entries, commits, last)
        check_files(paths, temporary=kind["temporary"])
    assert not kind["temporary"] or not any(path.exists() and any(path.iterdir()) for path in paths)


def check_what_is_left(paths, entries, commits, before):
    """The last commit is the one that was made last, or the one that was being made."""
    made = [entry for entry in entries if entry[1] == "commit"]
    last = before
    for previous in (False, True):
        try:
            store = TensorStore.open(paths, previous=previous)
        except tensorferry.StorageError as error:
            is_missed = before is not None or any(how == "did" for how, *_ in made)
            if error.errno != errno.ENOENT or (is_missed and not previous):
                raise
            continue
        with store:
            record = store.record.decode()
            if not previous:
                last = record
                possible = [before, *(entry[2] for entry in made)]
                # The last one was being made if it was not noted as made.
                is_done = not made or made[-1][0] == "did"
                assert record in possible[-1 if is_done else -2 :]
            check_sums(store, commits[record])
    for how, what, record, sums in entries:
        parts = sorted(paths[0].parent.glob(f"snapshot{int(record):010}-*"))
        if what == "snapshot" and parts:
            incomplete = [tensorferry.StorageError] if how == "may" else []
            with contextlib.suppress(*incomplete), TensorStore.open(parts) as store:
                assert store.record.decode() == record
                check_sums(store, sums)
    return last


def check_sums(store, sums):
    for name in {*store, *sums}:
        value = bytes(memoryview(store.read(name).result()).cast("B")) if name in store else None
        assert sum_of(value) in sums.get(name, [None]), name
