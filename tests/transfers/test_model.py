"""Random sequences of the public calls for files, handles and streams, with failures, against plain bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import zlib
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import tensorferry
from tests.support import effort
from tests.support.data import aligned
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.faultfs import FaultFS

NAMES = ("a", "b", "below/c")
CHUNK = 8192
names, slots, bools = st.sampled_from(NAMES), st.integers(0, 2), st.booleans()
offsets = st.sampled_from([0, 0, 1, 511, 4095, 4096, 70_000, 131_072])
sizes = st.sampled_from([0, 1, 17, 4096, 9_001, 65_536, 200_003])
ranges = st.tuples(offsets, sizes, sizes)  # of a file, and where its memory is cut in two
directs: Any = st.sampled_from(["auto", "auto", False, True])
forms: Any = st.sampled_from([pathlib.Path, str, os.path.relpath, os.fsencode])
modes = st.sampled_from(["r", "r+", "w", "w+", "x", "x+"])
faults = st.sampled_from(["write", "read", "open", "truncate", "fallocate", "rename"])
Range = tuple[int, int, int]
Part = tuple[
    int, bytes | None
]  # an offset, and the bytes written there; None: the new end of the file


def merged(old: bytes, parts: Sequence[Part]) -> bytes:
    """Return the content of a file after writes, of which the later ones win."""
    found = bytearray(old)
    for offset, data in parts:
        if data is None:
            found[offset:] = bytes(max(0, offset - len(found)))
        elif data:
            found.extend(bytes(max(0, offset + len(data) - len(found))))
            found[offset : offset + len(data)] = data
    return bytes(found)


def arrays_of(data: bytes, cut: int) -> list[Any]:
    """Return data in memory of different alignment: as one array, or as two if the cut is within it."""
    parts = [data[:cut], data[cut:]] if 0 < cut < len(data) else [data]
    arrays = [aligned(len(part), cut % 3 * 64) for part in parts]
    for array, part in zip(arrays, parts, strict=True):
        array[:] = np.frombuffer(part, np.uint8)
    return arrays


class Calls(RuleBasedStateMachine):
    """What each file must hold, and the objects that are open on them."""

    def __init__(self, folder: pathlib.Path, engine: str, faultfs: FaultFS | None) -> None:
        super().__init__()
        self.folder, self.faultfs, self.before = folder, faultfs, os.getcwd()  # noqa: PTH109
        self.below = folder if faultfs is None else faultfs.backing  # where no fault is met
        (self.below / "below").mkdir(exist_ok=True)
        for name in NAMES:
            (self.below / name).unlink(missing_ok=True)
        self.content: dict[str, bytes | None] = dict.fromkeys(NAMES)
        self.files: dict[int, tuple[Any, str]] = {}  # by slot: an open or closed file, and its name
        self.handle = tensorferry.aio_handle(engine=engine, block_size=16 << 10)
        self.pending: dict[str, list[Part]] = {}  # asynchronous writes by file, in order
        self.waits: list[Any] = []  # for these writes
        self.streams: dict[
            int, tuple[Any, int]
        ] = {}  # by the slots of their files; with their ends
        self.failures: list[tensorferry.StorageError] = []  # of these writes
        self.may_fail = False
        self.random = np.random.default_rng(5)

    def teardown(self) -> None:
        os.chdir(self.before)
        self.arm_nothing()
        for stream, _ in self.streams.values():
            stream.abort()
        for file, _ in self.files.values():
            file.close()
        self.handle.close()

    def arm_nothing(self) -> None:
        self.may_fail = False
        if self.faultfs is not None:
            self.faultfs.clear()

    @contextlib.contextmanager
    def writing(self, parts: dict[str, list[Part]], end: int | None = None) -> Iterator[None]:
        """Expect that the block makes these writes, or fails, and then has changed nothing outside their ranges."""
        if parts.keys() & self.pending.keys():
            self.settle()
        try:
            yield
        except tensorferry.StorageError as error:
            assert self.may_fail, error  # noqa: PT017
            for name, each in parts.items():
                self.take_what_is_left(name, each)
        else:
            for name, each in parts.items():
                new = merged(self.content[name] or b"", each)
                self.content[name] = new if end is None else new[:end].ljust(end, b"\0")
        if not self.pending:
            self.arm_nothing()

    def take_what_is_left(self, name: str, parts: list[Part]) -> None:
        """After a failed write, each byte is the old one or that of a part, and the file is not shorter."""
        old = self.content[name] or b""
        with contextlib.suppress(FileNotFoundError):
            found = (self.below / name).read_bytes()
            cut = any(data is None for _, data in parts)
            assert (
                cut or len(found) >= len(old) or found == merged(b"", parts)
            )  # an atomic one of several
            possible = [old, *(merged(old, [part]) for part in parts), *[b""] * cut]
            rows = [each[: len(found)].ljust(len(found), b"\0") for each in possible]
            values = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), len(found))
            assert (np.frombuffer(found, np.uint8) == values).any(0).all()
            self.content[name] = found

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Keep a failure for settle()."""
        try:
            yield
        except tensorferry.StorageError as error:
            assert self.may_fail, error  # noqa: PT017
            self.failures.append(error)

    def settle(self) -> None:
        for wait in [*self.waits, *(stream.finish for stream, _ in self.streams.values())]:
            with self.noting():
                wait()
        pending, self.pending = self.pending, {}
        failures, self.failures = self.failures, []
        self.waits, self.streams = [], {}
        with contextlib.ExitStack() as stack:
            for name, parts in pending.items():
                stack.enter_context(self.writing({name: parts}))
            for failure in failures:
                raise failure

    def data(self, nbytes: int) -> bytes:
        return self.random.integers(1, 256, nbytes, np.uint8).tobytes()

    @invariant()
    def every_file_holds_what_was_written(self) -> None:
        for name in NAMES:
            path, content = self.below / name, self.content[name]
            if name not in self.pending:
                assert (path.read_bytes() if path.exists() else None) == content, name

    # The functions

    @rule(
        name=names,
        form=forms,
        where=ranges,
        direct=directs,
        given=bools,
        cut=st.sampled_from([None, None, True, False]),
        how=st.tuples(bools, bools, bools),
    )
    def write(
        self, name: str, form: Any, where: Range, direct: Any, given: bool, cut: Any, how: Any
    ) -> None:
        offset, data, (sync, atomic, summed) = where[0] * given, self.data(where[1]), how
        atomic &= not given and cut is not False
        for slot in [slot for slot, (_, other) in self.files.items() if atomic and other == name]:
            self.close(slot)  # it would still have the old file
        sums = tensorferry.Checksums(CHUNK) if summed else None
        options: dict[str, Any] = {
            "direct": direct,
            "sync": sync,
            "atomic": atomic,
            "truncate": cut,
            "checksums": sums,
        }
        if given:
            options["offset"] = offset
        done = False
        with self.writing(
            {name: [(offset, data)]},
            offset + len(data) if cut or not (given or cut is False) else None,
        ):
            tensorferry.write(form(self.folder / name), arrays_of(data, where[2]), **options)
            done = True
        if sums is not None and done:
            expected = [zlib.crc32(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
            assert sums.chunks == expected
        elif sums is not None:
            with pytest.raises(ValueError, match="not complete"):
                _ = sums.chunks

    @rule(
        items=st.lists(st.tuples(names, ranges), min_size=1, max_size=5), form=forms, direct=directs
    )
    def write_many(self, items: list[tuple[str, Range]], form: Any, direct: Any) -> None:
        parts: dict[str, list[Part]] = {}
        given = []
        for name, (offset, size, _) in items:
            parts.setdefault(name, []).append((offset, self.data(size)))
            given.append((form(self.folder / name), parts[name][-1][1], offset))
        with self.writing(parts):
            tensorferry.write_many(given, direct=direct)

    @rule(name=names, where=ranges, direct=directs, many=bools)
    def read(self, name: str, where: Range, direct: Any, many: bool) -> None:
        path, (offset, size, cut) = self.folder / name, where
        parts = arrays_of(bytes(size), cut)
        items = [(path, each, offset + at * cut) for at, each in enumerate(parts)]
        with self.reading(name, where, parts):
            if many:
                tensorferry.read_many(items, direct=direct)
            else:
                tensorferry.read(path, parts, offset, direct=direct)

    @contextlib.contextmanager
    def reading(self, name: str, where: Range, parts: list[Any]) -> Iterator[None]:
        """Expect that the block fills the parts, or fails for a reason that is known."""
        self.settle()
        content, (offset, size, _) = self.content[name], where
        is_there = content is not None and (not size or offset + size <= len(content))
        try:
            yield
        except tensorferry.StorageError as error:
            short = isinstance(error, tensorferry.ShortReadError)
            assert self.may_fail or (not is_there and short == (content is not None)), error  # noqa: PT017
        else:
            assert is_there
            assert b"".join(map(bytes, parts)) == (content or b"")[offset : offset + size]
        self.arm_nothing()

    # Open files and handles

    @rule(slot=slots, name=names, form=forms, mode=modes, direct=directs, own=bools)
    def open(self, slot: int, name: str, form: Any, mode: str, direct: Any, own: bool) -> None:
        self.close(slot)
        old, how = self.content[name], {"queue_depth": 2, "block_size": 8192} if own else {}
        expected = {"r": errno.ENOENT * (old is None), "x": errno.EEXIST * (old is not None)}
        try:
            file = tensorferry.open(form(self.folder / name), mode, direct=direct, **how)  # type: ignore[arg-type]
        except tensorferry.StorageError as error:
            assert self.may_fail or error.errno == expected.get(mode[0]), error  # noqa: PT017
            path = self.below / name
            self.content[name] = path.read_bytes() if path.exists() else None
            assert self.content[name] in (old, b"")
        else:
            assert not expected.get(mode[0])
            self.files[slot] = file, name
            self.content[name] = old if mode[0] == "r" else b""
        self.arm_nothing()

    @rule(slot=slots)
    def close(self, slot: int) -> None:
        self.settle()
        if slot in self.files:
            self.files[slot][0].close()

    def usable(self, slot: int, *, write: bool) -> Any:
        """Return the file in a slot and its name; None if there is none, or if it must refuse the call, and does."""
        file, name = self.files.get(slot, (None, ""))
        core = None if file is None else file._file
        if core is not None and (core.writable if write else core.readable):
            return file, name
        for method in (
            () if file is None else ("write", "write_from") if write else ("read", "read_into")
        ):
            with pytest.raises(ValueError, match=r"is closed|was not opened for"):
                getattr(file, method)(bytearray(3))
        return None

    @rule(slot=slots, where=ranges, way=st.integers(0, 4))
    def write_file(self, slot: int, where: Range, way: int) -> None:
        if (found := self.usable(slot, write=True)) is None:
            return
        (file, name), (offset, size, cut) = found, where
        data = self.data(size)
        arrays = arrays_of(data, cut)
        if way == 0 or (way == 1 and name in self.pending):  # together with others
            with self.noting():
                if way == 0:
                    self.waits.append(file.write_from(arrays, offset).result)
                else:
                    file.write(arrays, offset)
            self.pending.setdefault(name, []).append((offset, data))
            return
        with self.writing({name: [(offset, data)]}):
            if way == 1:
                file.write(arrays, offset, priority="background")
            elif way == 2:
                self.handle.sync_pwrite(data, self.folder / name, offset)
            elif way == 3:
                self.handle.async_pwrite(data, file._file.descriptor, offset)
                assert self.handle.wait() == 1
            else:
                with file.stream(offset) as stream:
                    stream.append(arrays)

    @rule(slot=slots, where=ranges, end=st.sampled_from([None, None, None, False, True]))
    def append(self, slot: int, where: Range, end: bool | None) -> None:
        """Append to a stream, which may stay open. Its bytes and its truncation are in the order of writes."""
        if (found := self.usable(slot, write=True)) is None:
            return
        (file, name), (offset, size, cut) = found, where
        parts = self.pending.setdefault(name, [])
        with self.noting():
            stream, at = self.streams.pop(slot, None) or (file.stream(offset), offset)
            data = self.data(size)
            parts.append((at, data))
            stream.append(arrays_of(data, cut))
            if end is None:
                self.streams[slot] = stream, at + size
            else:
                parts += [(at + size, None)] * end
                stream.begin_finish(truncate=end)
                self.waits.append(stream.wait)

    @rule(slot=slots, where=ranges, way=st.integers(0, 2))
    def read_file(self, slot: int, where: Range, way: int) -> None:
        if (found := self.usable(slot, write=False)) is None:
            return
        (file, name), (offset, size, cut) = found, where
        parts = arrays_of(bytes(size), cut)
        with self.reading(name, where, parts):
            if way == 0:
                file.read(parts, offset)
            elif way == 1:
                file.read_into(parts, offset).result()
            else:
                for at, part in enumerate(parts):
                    self.handle.sync_pread(part, file._file.descriptor, offset + at * cut)

    @rule(slot=slots, nbytes=sizes, extends=bools)
    def resize(self, slot: int, nbytes: int, extends: bool) -> None:
        found = self.usable(slot, write=True)
        if found is not None and not extends and found[1] in self.pending:
            with self.noting():
                found[0].truncate(nbytes)
            self.pending[found[1]].append((nbytes, None))
            return
        self.settle()
        self.arm_nothing()
        if found is not None:
            file, name = found
            old = self.content[name] or b""
            (file.preallocate if extends else file.truncate)(nbytes)
            self.content[name] = new = old[: None if extends else nbytes].ljust(nbytes, b"\0")
            assert file.size == len(new)

    @rule(slot=slots, steps=st.lists(st.tuples(st.integers(0, 5), ranges), min_size=2, max_size=8))
    def many_in_order(self, slot: int, steps: list[tuple[int, Range]]) -> None:
        """Streams, writes and truncations, of which later ones do not wait for earlier ones."""
        for kind, where in steps:
            if kind < 2:
                self.write_file(slot, where, kind)
            elif kind < 5:
                self.append(slot, where, (None, None, True)[kind - 2])
            else:
                self.resize(slot, where[1], extends=False)

    # What is around the calls

    @rule(kind=faults, skip=st.integers(0, 3), code=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def arm(self, kind: str, skip: int, code: int) -> None:
        if self.faultfs is not None:
            self.settle()
            self.may_fail = True
            self.faultfs.order(Fault(kind, error=code, times=1, skip=skip))

    @rule(below=bools)
    def change_directory(self, below: bool) -> None:
        os.chdir(self.folder / "below" if below else self.folder)

    @rule(name=names)
    def refuse(self, name: str) -> None:
        path, memory = self.folder / name, np.zeros(10, np.uint8)
        descriptor = os.open(self.folder, os.O_RDONLY)
        for kind, call in [
            (ValueError, lambda: tensorferry.read(path, [memory[:5], memory[4:]])),
            (
                ValueError,
                lambda: tensorferry.read_many([(path, memory, 0), (path, memory[9:], 50)]),
            ),
            (ValueError, lambda: tensorferry.write(path, memory, -1)),
            (ValueError, lambda: tensorferry.write_many([(path, memory), (path, memory)])),
            (TypeError, lambda: tensorferry.write(descriptor, memory)),  # type: ignore[arg-type]
            (TypeError, lambda: tensorferry.write_many([(path, memory), (descriptor, memory)])),  # type: ignore[list-item]
            (TypeError, lambda: tensorferry.read(descriptor, memory)),  # type: ignore[arg-type]
        ]:
            with pytest.raises(kind):
                call()
        os.close(descriptor)

    @rule(name=names, slot=slots)
    def fork(self, name: str, slot: int) -> None:
        """A child has what its parent wrote, can write itself, and may not use its parent's objects."""
        self.settle()
        self.arm_nothing()
        data = self.data(5000)
        process = os.fork()
        if process == 0:
            with contextlib.suppress(BaseException):
                if slot in self.files and not self.files[slot][0].closed:
                    with pytest.raises((RuntimeError, ValueError)):
                        self.files[slot][0].read(bytearray(1))
                tensorferry.write(self.folder / name, data)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(process, 0)[1] == 0
        self.content[name] = data


@pytest.mark.parametrize("place", ["drive", "fuse"])
def test_any_calls_leave_what_plain_bytes_would_hold(
    default_engine: str, directory: pathlib.Path, place: str, request: pytest.FixtureRequest
) -> None:
    faultfs = request.getfixturevalue("faultfs") if place == "fuse" else None
    folder = directory if faultfs is None else faultfs.path
    settings = hypothesis.settings(max_examples=effort.examples(20), stateful_step_count=40)
    run_state_machine_as_test(lambda: Calls(folder, default_engine, faultfs), settings=settings)
