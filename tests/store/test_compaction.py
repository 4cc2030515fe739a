"""Segments that are nearly empty are given back, and nothing that is stored is harmed by it."""

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore, compaction
from tests.store.data import full, pattern
from tests.support import leaks, mounts
from tests.support.effort import EFFORT
from tests.support.faultfs import Fault

SEGMENT = 64 << 10
# For compact(): whatever is less than half in use, or small.
EVERYTHING = -(1 << 60), 0


def used_nbytes(*directories):
    """Return what files that this process has open in directories have of the drive, as du counts it."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if Path(path).parent in directories:
                status = os.stat(f"/proc/self/fd/{descriptor}")
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values()), len(found)


@pytest.mark.parametrize("seed", range(8))
def test_any_life_keeps_what_is_stored(tmp_path, seed):
    """Snapshots, commits, mappings and rewrites in any order, of a store that gives up all that it may."""
    rng = np.random.default_rng(seed)
    paths = [tmp_path / "a", tmp_path / "b"][: 1 + seed % 2]
    temporary, checksums = seed % 4 < 2, seed < 6
    life = Life(tmp_path, paths, rng, temporary=temporary, checksums=checksums)
    for _ in range(round(400 * EFFORT)):
        life.step()
    life.end()
    assert life.moved_nbytes > 0


class Life:
    """A store beside dictionaries of what it, its mappings, snapshots and commits must have."""

    def __init__(self, root, paths, rng, **options):
        self.root, self.paths, self.rng, self.options = root, paths, rng, options
        self.snapshots, self.mappings, self.committed, self.reads = {}, [], None, []
        self.moved_nbytes = self.count = 0
        self.begin()

    def begin(self):
        self.store = TensorStore(self.paths, segment_nbytes=SEGMENT, **self.options)
        self.model = {}

    def step(self):
        steps = {"write": 30, "read": 5, "delete": 3, "reserve": 1, "map": 2, "unmap": 2}
        steps |= {"snapshot": 4, "forget": 4, "commit": 4, "compact": 6, "check": 2, "reopen": 0.2}
        weights = np.array(list(steps.values()))
        self.count += 1
        getattr(self, self.rng.choice(list(steps), p=weights / weights.sum()))()
        if self.rng.random() < 0.2:
            self.space_adds_up()

    def name(self):
        return str(self.rng.choice(sorted(self.model))) if self.model else None

    def write(self):
        name = f"t{self.rng.integers(40)}"
        nbytes = int(self.rng.choice([0, 1, 3000, 4096, 20_000, SEGMENT, 3 * SEGMENT + 5]))
        data = pattern(nbytes, self.count)
        ticket = self.store.write(name, data)
        if self.rng.random() < 0.5:
            ticket.result()
        self.model[name] = data

    def read(self):
        if name := self.name():
            out = np.zeros_like(self.model[name])
            self.reads.append((self.store.read(name, out), out, self.model[name]))

    def delete(self):
        if name := self.name():
            self.store.delete(name)
            del self.model[name]

    def reserve(self):
        self.store.reserve(int(self.rng.integers(1 << 20)))

    def map(self):
        name = self.name()
        if name and self.model[name].nbytes:
            view = np.frombuffer(self.store.map([(name, 0, self.model[name].nbytes)]), np.uint8)
            self.mappings.append((view, self.model[name]))

    def unmap(self):
        for view, want in self.mappings:
            assert (view == want).all()
        self.mappings.clear()

    def snapshot(self):
        path = self.root / f"snapshot{self.count}"
        self.store.snapshot(path)
        self.snapshots[path] = dict(self.model)

    def forget(self):
        while len(self.snapshots) > 2:
            path = next(iter(self.snapshots))
            with TensorStore.open(path) as old:
                assert_has(old, self.snapshots.pop(path))
            shutil.rmtree(path)

    def commit(self):
        if not self.options["temporary"]:
            self.store.commit(sync=bool(self.rng.random() < 0.2))
            self.committed = dict(self.model)

    def compact(self):
        compaction.compact(self.store, *EVERYTHING)
        if self.rng.random() < 0.3:
            self.check()

    def check(self):
        assert_has(self.store, self.model)
        for ticket, out, want in self.reads:
            ticket.result()
            assert (out == want).all()
        self.reads.clear()

    def reopen(self):
        self.check()
        self.moved_nbytes += self.store.stats()["moved_nbytes"]
        self.store.close()
        if self.committed is not None:
            with TensorStore.open(self.paths) as old:
                assert_has(old, self.committed)
        self.begin()

    def space_adds_up(self):
        self.store.stats()
        for directory in self.store._directories:
            segments = list(directory.segments.values())
            assert directory.held_nbytes == sum(one.held_nbytes for one in segments)
            assert directory.used_nbytes == sum(one.used_nbytes for one in segments)
            for one in segments:  # and some blocks that tell where its others are
                assert os.fstat(one.file.descriptor).st_blocks * 512 <= one.held_nbytes + 16384

    def end(self):
        self.reopen()
        self.store.close()
        self.unmap()
        for path, want in self.snapshots.items():
            with TensorStore.open(path) as old:
                assert_has(old, want)


def assert_has(store, model):
    assert sorted(store) == sorted(model)
    for name, want in model.items():
        assert (np.asarray(store.read(name).result()) == want).all(), name
