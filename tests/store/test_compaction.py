"""Compaction: nearly empty segments are freed, and stored tensors are unchanged."""

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
    """Return the disk space of this process's open files in directories, as du counts it."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if descriptor.readlink().parent in directories:
                status = descriptor.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values()), len(found)


@pytest.mark.parametrize("seed", range(8))
def test_any_life_keeps_what_is_stored(tmp_path, seed):
    """Snapshots, commits, mappings and rewrites in any order, of a store that compacts as much as possible."""
    rng = np.random.default_rng(seed)
    paths = [tmp_path / "a", tmp_path / "b"][: 1 + seed % 2]
    temporary, checksums = seed % 4 < 2, seed < 6
    life = Life(tmp_path, paths, rng, temporary=temporary, checksums=checksums)
    for _ in range(round(400 * EFFORT)):
        life.step()
    life.end()
    assert life.moved_nbytes > 0


class Life:
    """A store, and dictionaries with the expected contents of it, its mappings, snapshots and commits."""

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
            for one in segments:  # and the blocks of its metadata
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


def sparse(store, snapshot=None, count=24, nbytes=5000):
    """Leave few tensors in each segment: the others have been rewritten after a snapshot.

    On a file system without links, the effect of a snapshot on the segments is simulated.
    """
    model = {str(at): pattern(nbytes, at) for at in range(count)}
    for name, data in model.items():
        store.write(name, data)
    if snapshot is not None:
        store.snapshot(snapshot)
    else:
        store._contents(b"")  # waits
        store._allocator.retire(list(store._allocator.segments()))
    for at in range(count):
        if at % 8:
            model[str(at)] = pattern(nbytes, 1000 + at)
            store.write(str(at), model[str(at)]).result()
    return model


@pytest.mark.parametrize("options", [{}, {"temporary": False}, {"checksums": False}])
def test_many_rewrites_with_snapshots_take_twice_the_bytes_and_64_mib(tmp_path, options):
    """With TENSORFERRY_TEST_EFFORT=1000 a million of them."""
    rng = np.random.default_rng(7)
    data = pattern(1 << 20)
    model = {}
    with TensorStore(tmp_path / "s", **options) as store:
        for at in range(round(1000 * EFFORT)):
            name, nbytes = str(rng.integers(200)), int(rng.integers(1, 400_000))
            begin = int(rng.integers(data.nbytes - nbytes))
            store.write(name, data[begin : begin + nbytes])
            model[name] = data[begin : begin + nbytes]
            if at % 25 == 0:
                store.snapshot(tmp_path / "snapshot")
                shutil.rmtree(tmp_path / "snapshot")
            if at % 100 == 0 and "temporary" in options:
                store.commit()
        if "temporary" in options:
            store.commit()

        def bound():
            return 2 * sum(-(-one.nbytes // 4096) * 4096 for one in model.values()) + (64 << 20)

        assert leaks.settled(lambda: used_nbytes(tmp_path / "s")[0] <= bound())
        assert_has(store, model)
        for name in sorted(model)[20:]:  # leaves nearly no tensors
            store.delete(name)
            del model[name]
        if "temporary" in options:
            store.commit()
        assert leaks.settled(lambda: used_nbytes(tmp_path / "s")[0] <= bound())
        assert_has(store, model)


@pytest.mark.parametrize("every", [1, 10])
def test_what_is_deleted_gives_its_space_back(tmp_path, every):
    with TensorStore(tmp_path / "s") as store:
        for at in range(200):
            store.write(str(at), full(at, 1 << 20)).result()
        for at in range(200):
            if every == 1 or at % every:
                store.delete(str(at))
        compaction.compact(store, 64 << 20, 64)
        assert used_nbytes(tmp_path / "s")[0] <= 2 * (len(store) << 20) + (64 << 20)
        for name in store:
            assert (store.read(name).result() == int(name)).all()


def test_descriptors_stay_bounded_where_snapshots_keep_a_little_each(tmp_path):
    with TensorStore(tmp_path / "s") as store:
        for at in range(150):
            store.write(str(at), full(at, 4096)).result()
            store.snapshot(tmp_path / f"snapshot{at}")
        assert leaks.settled(lambda: used_nbytes(tmp_path / "s")[1] <= 50)
        for at in range(150):
            assert (store.read(str(at)).result() == at).all()
    for at in range(0, 150, 10):
        with TensorStore.open(tmp_path / f"snapshot{at}") as old:
            assert all((old.read(str(one)).result() == one).all() for one in range(at + 1))


def test_a_snapshot_has_no_more_than_what_was_stored(tmp_path):
    with TensorStore(tmp_path / "s") as store:
        store.reserve(40 << 20)
        store.write("a", pattern(3 << 20)).result()
        store.snapshot(tmp_path / "snapshot")
    taken = sum(one.stat().st_blocks * 512 for one in (tmp_path / "snapshot").iterdir())
    assert taken <= (3 << 20) + 65536


def test_what_is_reserved_stays(tmp_path):
    with TensorStore(tmp_path / "s") as store:
        store.reserve({"a": 80 << 20}, in_flight_nbytes=80 << 20)
        store.write("a", full(1, 1000)).result()
        store.snapshot(tmp_path / "snapshot")
        shutil.rmtree(tmp_path / "snapshot")
        compaction.compact(store, *EVERYTHING)
        assert store.stats()["directories"][0]["free_nbytes"] >= 2 * 80 << 20


@pytest.mark.parametrize("op", ["read", "write", "fallocate", "fsync"])
def test_compaction_that_fails_leaves_everything_as_it_was(faultfs, op):
    with TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False) as store:
        model = sparse(store)
        while op == "fallocate" and store.stats()["directories"][0]["free_nbytes"]:
            name = f"filler{len(model)}"
            model[name] = full(1, 4096)
            store.write(name, model[name]).result()
        store.commit(sync=True)
        error = errno.ENOSPC if op == "fallocate" else errno.EIO
        faultfs.order(Fault(op, error=error))
        compaction.compact(store, *EVERYTHING)
        assert faultfs.hits()
        assert store.stats()["moved_nbytes"] == 0
        faultfs.clear()
        assert_has(store, model)
        compaction.compact(store, *EVERYTHING)
        store.commit()
        compaction.compact(store, *EVERYTHING)
        assert_has(store, model)
        assert store.stats()["moved_nbytes"] > 0
    with TensorStore.open(faultfs.path) as old:
        assert_has(old, model)


def test_what_is_damaged_stays_and_is_reported(faultfs):
    with TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False) as store:
        model = sparse(store)
        store.stats()
        piece = store._names["8"].pieces[0]
        with (faultfs.backing / piece.segment.name).open("r+b") as file:
            file.seek(piece.offset)
            file.write(bytes(4096))
        number = piece.segment.number
        del piece  # a mapping would keep the tensor in its segment
        for _ in range(2):
            compaction.compact(store, *EVERYTHING)
            with pytest.raises(tensorferry.ChecksumError, match="'8'"):
                store.read("8").result()
        assert number in store._directories[0].segments
        assert store.stats()["moved_nbytes"] > 0
        del model["8"]
        store.delete("8")
        assert_has(store, model)


def test_the_last_commit_is_moved_too(tmp_path):
    path = tmp_path / "s"
    with TensorStore(path, segment_nbytes=SEGMENT, temporary=False) as store:
        model = sparse(store, tmp_path / "snapshot")
        store.commit(b"kept", sync=True)
        before = (path / "tensorferry-store.json").read_bytes()
        compaction.compact(store, *EVERYTHING)
        assert (path / "tensorferry-store.json").read_bytes() != before
        named = {one.name for one in store._directories[0].segments.values()}
        assert {one.name for one in path.glob("*.segment")} == named
        store.write("0", b"never committed")
    with TensorStore.open(path) as old:
        assert old.record == b"kept"
        assert_has(old, model)


def test_mapped_and_read_tensors_are_not_touched(faultfs):
    with TensorStore(faultfs.path, segment_nbytes=SEGMENT) as store:
        model = sparse(store)
        view = np.frombuffer(store.map([("0", 0, 4096)]), np.uint8)
        faultfs.order(Fault("read", hold=True))
        reading = store.read("8")
        faultfs.await_held()
        thread = threading.Thread(target=compaction.compact, args=(store, *EVERYTHING))
        thread.start()
        store.write("8", full(1, 5000))
        faultfs.release()
        thread.join()
        assert (reading.result() == model["8"]).all()
        assert (view == model["0"][:4096]).all()
        model["8"] = full(1, 5000)
        assert_has(store, model)


def test_close_ends_a_compaction(faultfs):
    store = TensorStore(faultfs.path, segment_nbytes=SEGMENT, temporary=False)
    sparse(store)
    store.commit()
    faultfs.order(Fault("read", hold=True))
    compactor = store._compactor = threading.Thread(
        target=compaction.compact, args=(store, *EVERYTHING)
    )
    compactor.start()
    faultfs.await_held()
    closing = threading.Thread(target=store.close)
    closing.start()
    assert leaks.settled(store._ending.is_set)
    faultfs.release()
    closing.join(120)
    compactor.join(120)
    assert not closing.is_alive()
    assert not compactor.is_alive()
    with TensorStore.open(faultfs.path) as old:
        assert len(old) == 24


def test_a_write_that_finds_no_space_compacts_first(tmp_path):
    with (
        mounts.tmpfs(tmp_path / "tmpfs", 32 << 20) as path,
        TensorStore(path) as store,
    ):
        for name in range(100):
            store.write(str(name), full(name, 100_000)).result()
        store.snapshot(path / "snapshot")
        shutil.rmtree(path / "snapshot")
        for name in range(80):
            store.delete(str(name))
        store.write("large", full(7, 20_000_000)).result()
        assert (store.read("large").result() == 7).all()
        for name in range(80, 100):
            assert (store.read(str(name)).result() == name).all()


@pytest.mark.parametrize("seed", range(3))
def test_compaction_takes_no_write_its_space(tmp_path, seed):
    """On a drive that holds the promised bytes and little more, a writer of all of them never fails."""
    rng = np.random.default_rng(seed)
    with (
        mounts.tmpfs(tmp_path / "tmpfs", 24 << 20) as path,
        TensorStore(path, segment_nbytes=1 << 20) as store,
    ):
        sizes = {str(at): int(rng.integers(1, 200_000)) for at in range(40)}
        store.reserve(sizes, in_flight_nbytes=1 << 20)
        stop = threading.Event()

        def compact():
            while not stop.is_set():
                compaction.compact(store, *EVERYTHING)

        thread = threading.Thread(target=compact)
        thread.start()
        try:
            value = {}
            for at in range(600):
                name = str(rng.integers(40))
                value[name] = at % 251
                store.write(name, full(at % 251, sizes[name])).result()
                if at % 40 == 0:
                    store.snapshot(path / "snapshot")
                    shutil.rmtree(path / "snapshot")
        finally:
            stop.set()
            thread.join()
        for name, want in value.items():
            assert (store.read(name).result() == want).all()
