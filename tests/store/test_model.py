"""Random sequences of calls, compared with a dictionary."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorferry.store import TensorStore
from tensorferry.store.space import Space
from tests.store.data import pattern
from tests.support import leaks
from tests.support.effort import examples

SEGMENT = 32 << 10

names = st.sampled_from(["a", "b", "c", "d"])
sizes = st.one_of(
    st.integers(0, 10_000), st.sampled_from([4096, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT])
)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.model = {}
        self.reads = []
        self.mappings = []
        self.snapshots = {}
        self.committed = None
        self.count = 0

    @initialize(temporary=st.booleans(), several=st.booleans(), checksums=st.booleans())
    def make(self, temporary, several, checksums):
        self.paths = [self.path / "a", self.path / "b"][: 1 + several]
        self.temporary = temporary
        self.checksums = checksums
        self.open()

    def open(self):
        self.store = TensorStore(
            self.paths,
            segment_nbytes=SEGMENT,
            temporary=self.temporary,
            checksums=self.checksums,
        )

    @rule(name=names, nbytes=sizes, wait=st.booleans(), cut=st.integers(0, 100))
    def write(self, name, nbytes, wait, cut):
        self.count += 1
        data = pattern(nbytes, self.count)
        at = nbytes * cut // 100
        ticket = self.store.write(name, [data[:at], data[at:]] if cut % 2 else data)
        if wait:
            ticket.result()
        self.model[name] = data

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        want = self.model[name]
        out = np.zeros_like(want)
        self.reads.append((self.store.read(name, out=out), out, want))

    @rule()
    def look_at_reads(self):
        for ticket, out, want in self.reads:
            assert ticket.result() is out
            assert (out == want).all()
        self.reads.clear()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.store.delete(name)
        del self.model[name]

    @rule(data=st.data())
    def map(self, data):
        large = sorted(name for name, value in self.model.items() if value.nbytes)
        if not large:
            return
        chosen = data.draw(st.lists(st.sampled_from(large), min_size=1, max_size=3))
        ranges, want = [], []
        for at, name in enumerate(chosen):
            value = self.model[name]
            last = at == len(chosen) - 1
            nbytes = value.nbytes if last else value.nbytes // 4096 * 4096
            if nbytes:
                ranges.append((name, 0, nbytes))
                want.append(value[:nbytes])
        if ranges:
            view = np.frombuffer(self.store.map(ranges), np.uint8)
            self.mappings.append((view, np.concatenate(want)))

    @rule()
    def drop_mappings(self):
        self.mappings.clear()

    @rule(nbytes=st.integers(0, 200_000))
    def reserve(self, nbytes):
        self.store.reserve(nbytes)

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def snapshot(self):
        self.count += 1
        path = self.path / f"snap{self.count}"
        self.store.snapshot(path, b"s")
        self.snapshots[path] = dict(self.model)

    @precondition(lambda self: self.snapshots)
    @rule()
    def forget_snapshot(self):
        path = next(iter(self.snapshots))
        del self.snapshots[path]
        shutil.rmtree(path)

    @precondition(lambda self: not self.temporary)
    @rule()
    def commit(self):
        self.store.commit(b"c")
        self.committed = dict(self.model)

    @precondition(lambda self: not self.temporary)
    @rule()
    def reopen(self):
        self.store.close()
        self.look_at_reads()
        if self.committed is not None:
            with TensorStore.open(self.paths) as old:
                self.assert_has(old, self.committed)
        self.open()
        self.model.clear()

    @invariant()
    def names_and_sizes(self):
        if not hasattr(self, "store"):
            return
        assert sorted(self.store) == sorted(self.model)
        for name, value in self.model.items():
            assert self.store.info(name).nbytes == value.nbytes

    def assert_has(self, store, model):
        assert sorted(store) == sorted(model)
        for name, value in model.items():
            out = np.zeros_like(value)
            store.read(name, out=out).result()
            assert (out == value).all()

    @invariant()
    def space_adds_up(self):
        if not hasattr(self, "store"):
            return
        for directory in self.store._directories:
            segments = list(directory.segments.values())
            assert directory.held_nbytes == sum(one.held_nbytes for one in segments)

    def used(self):
        return sum(each["used_nbytes"] for each in self.store.stats()["directories"])

    def teardown(self):
        if not hasattr(self, "store"):
            shutil.rmtree(self.path)
            return
        self.look_at_reads()
        self.assert_has(self.store, self.model)
        assert all((view == want).all() for view, want in self.mappings)
        for path, model in self.snapshots.items():
            with TensorStore.open(path) as old:
                self.assert_has(old, model)
        if self.committed is None:
            self.mappings.clear()
            want = sum(self.store._allocator.rounded(value.nbytes) for value in self.model.values())
            leaks.settled(
                lambda: self.used() == want
            )  # the callback thread may still have references
            assert self.used() == want
        self.store.close()
        if self.committed is not None:
            with TensorStore.open(self.paths) as old:
                self.assert_has(old, self.committed)
        shutil.rmtree(self.path)


StoreMachine.TestCase.settings = settings(
    max_examples=examples(30),
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
test_any_order_of_calls = StoreMachine.TestCase


class SpaceMachine(RuleBasedStateMachine):
    """Free ranges against a bitmap."""

    def __init__(self):
        super().__init__()
        self.space = Space()
        self.free = {}
        self.taken = []

    @rule(size=st.integers(1, 64))
    def new_segment(self, size):
        number = len(self.free)
        self.free[number] = [True] * size
        self.space.free(number, 0, size)

    @rule(nbytes=st.integers(1, 32))
    def take(self, nbytes):
        found = self.space.allocate(nbytes)
        if found is None:
            assert all(nbytes > gap for gaps in map(gaps_of, self.free.values()) for gap in gaps)
            return
        segment, begin = found
        assert all(self.free[segment][begin : begin + nbytes])
        self.free[segment][begin : begin + nbytes] = [False] * nbytes
        self.taken.append((segment, begin, nbytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data):
        at = data.draw(st.integers(0, len(self.taken) - 1))
        segment, begin, nbytes = self.taken.pop(at)
        self.free[segment][begin : begin + nbytes] = [True] * nbytes
        self.space.free(segment, begin, nbytes)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(sorted(self.free)))
        self.taken = [one for one in self.taken if one[0] != number]
        self.free[number] = []
        self.space.drop(number)

    @invariant()
    def counts(self):
        assert self.space.free_nbytes == sum(sum(one) for one in self.free.values())


def gaps_of(bits):
    gap, found = 0, []
    for bit in [*bits, False]:
        if bit:
            gap += 1
        elif gap:
            found.append(gap)
            gap = 0
    return found


SpaceMachine.TestCase.settings = settings(max_examples=examples(100))
test_free_space = SpaceMachine.TestCase
