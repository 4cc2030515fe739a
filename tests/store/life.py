"""The life of a store: random calls, compared with a model that has the versions of each tensor.

For each name the model has all values that the store may have: one after a call that has succeeded, and those before
and after a call that has failed. A commit or a snapshot has, for each name, one of the values of its moment. So the
same life can be lived undisturbed, with drives that fail or are full, with interrupts, and until it is killed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import sys
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

import tensorferry
from tensorferry.store import TensorStore
from tests.support.forks import passes_in_child

if TYPE_CHECKING:
    import pathlib

SIZES = [0, 1, 100, 4095, 4096, 5000, 70_000, 300_001, 1 << 20, (1 << 20) + 1, (4 << 20) + 1]
CALLS = {"write": 30, "read": 8, "delete": 5, "map": 3, "unmap": 1, "reserve": 2, "snapshot": 4}
CALLS |= {"forget": 3, "commit": 8, "drop_previous": 1, "check": 1, "stats": 1, "reopen": 0.6}
CALLS |= {"second": 0.5, "fork": 0.2, "change_directory": 0.5}
ABSENT = None
# For each name, the values that the store may have: bytes, or ABSENT.
State = dict[str, list[Any]]


class Life:
    """A store, and the model of its contents, commits, snapshots, mappings and reads in progress.

    Parameters
    ----------
    root : path
        A directory for everything.
    log : path, optional
        A file for the states of commits and snapshots, before and after each of them.
    """

    def __init__(
        self,
        root: pathlib.Path,
        seed: int,
        *,
        directories: int = 1,
        log: pathlib.Path | None = None,
        **options: Any,
    ) -> None:
        print(f"seed {seed}, {directories} directories, {options}")
        self.root, self.rng, self.options = root, np.random.default_rng(seed), options
        self.log, self.temporary = log, options.get("temporary", True)
        self.paths = [root / f"drive{number}" for number in range(directories)]
        self.count = seed * 100_000
        # The commits that may be the last and the previous one: a record and a state, or None.
        self.last: list[Any] = [self.commit_there()]
        self.previous: list[Any] = [self.commit_there(previous=True)]
        self.snapshots: dict[pathlib.Path, tuple[bytes, State]] = {}
        self.mappings: list[tuple[Any, bytes]] = []
        self.reads: list[tuple[Any, bytearray, list[Any]]] = []
        self.failures: list[str] = []  # the calls that have raised
        self.may_fail = False
        self.begin()

    def begin(self) -> None:
        self.state: State = {}
        self.store = TensorStore(self.paths, **self.options)

    def live(self, calls: int, *, failing: Any = contextlib.nullcontext) -> None:
        """Make random calls, each within ``failing()``, which may make it fail."""
        self.may_fail = failing is not contextlib.nullcontext
        weights = np.array(list(CALLS.values()))
        for _ in range(calls):
            self.count += 1
            call = str(self.rng.choice(list(CALLS), p=weights / weights.sum()))
            try:
                with failing():
                    getattr(self, call)()
            except (tensorferry.StorageError, KeyboardInterrupt) as error:
                if not self.may_fail or isinstance(error, tensorferry.ChecksumError):
                    raise  # what is stored is never damaged
                self.failures.append(call)
            if self.store.closed:
                with contextlib.suppress(tensorferry.StorageError):
                    self.store.close()
                self.begin()

    # The calls

    def write(self) -> None:
        name = f"t{self.rng.integers(12)}"
        value = self.rng.bytes(int(self.rng.choice(SIZES)))
        self.state[name] = [*self.state.get(name, [ABSENT]), value]
        cut = int(self.rng.integers(len(value) + 1))
        several = [value[:cut], value[cut:]]
        array = several if self.count % 4 == 0 else np.frombuffer(value, np.uint8)
        future = self.store.write(name, array)
        if self.count % 2:
            future.result()
        if self.count % 2 or not self.may_fail:
            self.state[name] = [value]

    def read(self) -> None:
        if name := self.any_name():
            values = self.state[name]
            if ABSENT not in values and len(sizes := {len(value) for value in values}) == 1:
                out = bytearray(sizes.pop())
                self.reads.append((self.store.read(name, out), out, values))

    def delete(self) -> None:
        if name := self.any_name():
            self.state[name] = [*self.state[name], ABSENT]
            with contextlib.suppress(KeyError):
                self.store.delete(name)
            self.state[name] = [ABSENT]

    def map(self) -> None:
        ranges, wanted = [], b""
        for name, values in list(self.state.items())[: 1 + self.count % 3]:
            if len(values) == 1 and values[0] is not ABSENT and len(values[0]) >= 4096:
                at, end = len(values[0]) // 8192 * 4096, len(values[0]) // 4096 * 4096
                ranges.append((name, at, end - at))
                wanted += values[0][at:end]
        if ranges:
            self.mappings.append((self.store.map(ranges), wanted))

    def unmap(self) -> None:
        while self.mappings:
            view, wanted = self.mappings.pop()
            assert memoryview(view).cast("B") == wanted

    def reserve(self) -> None:
        sizes = {f"t{n}": int(self.rng.choice(SIZES)) for n in range(4)}
        if self.count % 2:
            self.store.reserve(sum(sizes.values()), in_flight_nbytes=1 << 20)
        else:
            self.store.reserve(sizes)

    def snapshot(self) -> None:
        record, path = b"%d" % self.count, self.root / f"snapshot{self.count:010}"
        parts = range(len(self.paths) if self.count % 2 else 1)
        paths = [path.with_name(f"{path.name}-{part}") for part in parts]
        self.snapshots[path] = record, self.states()
        self.write_log("may", "snapshot", record, self.states())
        self.store.snapshot(paths, record)
        self.write_log("did", "snapshot", record, self.states())

    def forget(self) -> None:
        while len(self.snapshots) > 2:
            path = next(iter(self.snapshots))
            self.check_snapshot(path, *self.snapshots.pop(path))
            for part in self.root.glob(f"{path.name}-*"):
                shutil.rmtree(part)

    def commit(self) -> None:
        if self.temporary:
            return
        keep, record = self.count % 3 == 0, b"%d" % self.count
        last, commit = self.last, (record, self.states())
        kept = last if keep else [None]
        self.last, self.previous = [*last, commit], [*self.previous, *kept]
        self.write_log("may", "commit", *commit)
        self.store.commit(record, sync=self.count % 4 == 0, keep_previous=keep)
        self.write_log("did", "commit", *commit)
        self.last, self.previous = [commit], kept

    def drop_previous(self) -> None:
        if not self.temporary:
            self.previous = [*self.previous, None]
            self.store.drop_previous()
            self.previous = [None]

    def check(self) -> None:
        """Compare all tensors. From then on each has the value that was read."""
        self.check_reads()
        for name in list(self.state):
            self.state[name] = [self.found(self.store, name, self.state)]
        wanted = {name for name, values in self.state.items() if values != [ABSENT]}
        assert set(self.store) == wanted
        assert len(self.store) == len(wanted)

    def stats(self) -> None:
        for each in self.store.stats()["directories"]:
            assert 0 <= each["used_nbytes"] <= each["reserved_nbytes"]
            assert each["used_nbytes"] + each["free_nbytes"] == each["reserved_nbytes"]

    def reopen(self) -> None:
        """Close the store, check its commits, and go on with a new store, which may go back."""
        self.store.close()
        self.check_reads()
        self.check_commits()
        self.begin()
        if self.previous != [None] and self.count % 2:
            self.last, before = [*self.last, *self.previous], self.previous
            self.write_log("may", "commit", *before[0])
            self.store.go_back()
            self.write_log("did", "commit", *before[0])
            self.last, self.previous = before, [None]

    def second(self) -> None:
        """Another store cannot write into the same directory; only a temporary one can."""
        if not self.temporary:
            with np.testing.assert_raises(tensorferry.StorageError):
                TensorStore(self.paths, temporary=False)
        with TensorStore(self.paths[0]) as other:
            other.write("x", b"x").result()

    def fork(self) -> None:
        def child() -> None:
            sys.settrace(None)
            for call in (lambda: self.store.write("t0", b"x"), self.store.commit):
                with np.testing.assert_raises(RuntimeError):
                    call()
            self.store.close()

        passes_in_child(child)

    def change_directory(self) -> None:
        os.chdir("/" if self.count % 2 else self.root)

    # Comparisons

    def commit_there(self, *, previous: bool = False) -> Any:
        """Return a commit that an earlier life has left, or None."""
        try:
            with TensorStore.open(self.paths, previous=previous) as old:
                state = {
                    name: [bytes(memoryview(old.read(name).result()).cast("B"))] for name in old
                }
                return old.record, state
        except tensorferry.StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def any_name(self) -> str | None:
        names = sorted(name for name, values in self.state.items() if values != [ABSENT])
        return str(self.rng.choice(names)) if names else None

    def states(self) -> State:
        return {name: list(values) for name, values in self.state.items()}

    def write_log(self, *entry: Any) -> None:
        if self.log is not None:
            *what, record, state = entry
            sums = {name: [sum_of(each) for each in state[name]] for name in state}
            with self.log.open("a") as file:
                file.write(json.dumps([*what, record.decode(), sums]) + "\n")

    def found(self, store: TensorStore, name: str, state: State) -> bytes | None:
        """Return the value of a tensor, which must be one of those in a state."""
        value = bytes(memoryview(store.read(name).result()).cast("B")) if name in store else ABSENT
        wanted = state.get(name, [ABSENT])
        assert value in wanted, (
            name,
            value and len(value),
            [each and len(each) for each in wanted],
        )
        return value

    def check_reads(self) -> None:
        while self.reads:
            future, out, values = self.reads.pop()
            if (error := future.exception()) is None:
                assert bytes(out) in values
            assert error is None or self.may_fail, error

    def check_snapshot(self, path: pathlib.Path, record: bytes, state: State) -> None:
        paths = sorted(self.root.glob(f"{path.name}-*"))
        assert paths or self.may_fail
        if paths:
            self.check_contents(TensorStore.open(paths), record, state)

    def check_contents(self, store: TensorStore, record: bytes, state: State) -> None:
        with store:
            assert store.record == record
            for name in {*store, *state}:
                self.found(store, name, state)

    def check_commits(self) -> None:
        self.last = [self.found_commit(self.last)]
        self.previous = [self.found_commit(self.previous, previous=True)]

    def found_commit(self, candidates: list[Any], *, previous: bool = False) -> Any:
        """Return which of several commits the directories have."""
        try:
            store = TensorStore.open(self.paths, previous=previous)
        except tensorferry.StorageError as error:
            if error.errno != errno.ENOENT or None not in candidates:
                raise
            return None
        commit = next((each for each in candidates if each and each[0] == store.record), None)
        assert commit, (store.record, [each and each[0] for each in candidates])
        self.check_contents(store, *commit)
        return commit

    def end(self) -> None:
        """Check everything, and that nothing else is left in the directories."""
        gc.collect()
        for call in (self.check, self.store.close):
            try:
                call()
            except tensorferry.StorageError as error:
                if not self.may_fail or isinstance(error, tensorferry.ChecksumError):
                    raise
        self.check_reads()
        self.check_commits()
        self.unmap()
        for path, snapshot in self.snapshots.items():
            self.check_snapshot(path, *snapshot)
        os.chdir("/")
        check_files(self.paths, temporary=self.temporary)


def sum_of(value: bytes | None) -> int | None:
    return None if value is ABSENT else zlib.crc32(value)


def check_files(paths: list[pathlib.Path], *, temporary: bool) -> None:
    """The directories have only the files of commits, at the latest after the next store."""
    needed = set()
    if not temporary:
        TensorStore(paths, temporary=False).close()
        for previous in (False, True):
            with (
                contextlib.suppress(tensorferry.StorageError),
                TensorStore.open(paths, previous=previous) as old,
            ):
                needed |= {one.name for each in old._directories for one in each.segments}
    # A life may have been killed before it had made its directories.
    found = {each.name for path in paths if path.exists() for each in path.iterdir()}
    allowed: tuple[str, ...] = () if temporary else (".tensorferry-store.lock", ".json")
    assert {each for each in found if not each.endswith(allowed)} == needed
