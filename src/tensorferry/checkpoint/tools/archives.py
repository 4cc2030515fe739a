"""Inspection of files of torch.save and of :func:`tensorferry.checkpoint.save` without loading them.

Such a file is a zip archive with a record for each storage, and a CRC-32 of each record, which torch never checks. The
core reads the file from beginning to end and computes the CRC-32s, so no data reach Python. The pickle shows to which
tensors a storage belongs. It is read only to name, list or convert tensors, and only that needs torch. No object in it
is created: in place of any class or function there is one that keeps what the pickle gives it, so tensors inside
modules or optimizers are found as well.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry._core import crc32, crc32_combine
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.tools.findings import Audit, Entry, Report, Shard
from tensorferry.checkpoint.zipformat import zips
from tensorferry.checkpoint.zipformat.unpickling import (
    Inert,
    MalformedError,
    RefusedError,
    inert,
    stand_in,
)
from tensorferry.checkpoint.zipformat.zips import Span, UnknownArchiveError
from tensorferry.transfer.piece_checksums import piece_crcs
from tensorferry.transfer.python_files import open_python_file, reopen
from tensorferry.transfer.remote import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from tensorferry.checkpoint.progress import Listener
    from tensorferry.checkpoint.tools.formats import ConversionSource
    from tensorferry.checkpoint.zipformat.blobs import Payload, PickledTensor

# Records are read in pieces of at most this size; for a piece that cannot be read, its byte range is reported.
_PIECE_NBYTES = 32 << 20
_MAX_PICKLE_NBYTES = 256 << 20
_MAX_NBYTES, _MAX_DIMS = (1 << 63) - 1, 1000
_TAIL_NBYTES = 1 << 16
_SHOWN_TENSORS = 4
# Limits for names and containers: a small pickle can use the same long key, or the same container, again and again.
_MAX_NAME, _MAX_DEPTH, _MAX_NODES = 256, 100, 1_000_000
_ITSELF = "(itself)"
# Attributes by which torch marks buffers, and what it calls for plain tensors: a conversion loses nothing by them.
_OF_BUFFERS = {"persistent", "_is_buffer"}
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")


def verify(path: str, *, progress: Listener | None = None, **_options: object) -> Report:
    """Verify a file by the checksums in it; no code in its pickle is ever run."""
    with open_python_file(path) as file:
        return _ArchiveAudit(path, file, progress).run()


def entries(path: str, **_options: object) -> list[Entry]:
    """Return the tensors of a file in the order of its pickle, then the payloads that the pickle does not mention.

    Raises
    ------
    OSError
        The file cannot be read.
    CheckpointError
        The file's pickle or directory is damaged.
    """
    with open_python_file(path) as file:
        archive = _OpenArchive(path, file)
        places = archive.places()
        found = archive.tensors(places)
    payloads = {_short_name(place.name): place for place in places}
    listed = [
        _entry(name, tensor, path, payloads.get(_record_of(tensor))) for name, tensor in found
    ]
    known = {_record_of(tensor) for _, tensor in found}
    for name, place in payloads.items():
        if name.startswith("data/") and name not in known:
            shard = Shard((), (), Path(path).name, place.begin, place.begin + place.nbytes)
            listed.append(Entry(place.name, None, (), place.nbytes, (shard,)))
    return listed


def find_source(path: str, **_options: object) -> ConversionSource:
    """Return the tensors to convert.

    Raises
    ------
    CheckpointError
        The file is damaged, or its tensors have no clear names or are not plain.
    """
    from tensorferry.checkpoint.storage import huggingface
    from tensorferry.checkpoint.tools.formats import ConversionSource

    identity = Version.at(path)
    verify(path).require_sound()
    others: list[str] = []
    with open_python_file(path) as file:
        archive = _OpenArchive(path, file)
        places = archive.places()
        found = archive.tensors(places, others)
        _check_records(archive, places, {_record_of(tensor) for _, tensor in found})
    by_name = {_short_name(place.name): place for place in places}
    payloads: dict[str, Payload] = {}
    for name, tensor in found:
        if name in payloads:
            raise CheckpointError("two tensors would have this name", path, names=(name,))
        if len(name) >= _MAX_NAME or "?" in name.split("."):
            reason = "its name is too long, or contains keys that are not text"
            raise CheckpointError(reason, path, names=(name,))
        payloads[name] = _payload(name, tensor, path, by_name.get(_record_of(tensor)))
    return ConversionSource(*huggingface.from_payloads(path, payloads, identity), others)


def _check_records(archive: _OpenArchive, places: list[Span], known: set[str]) -> None:
    """Refuse an archive of which torch could read other bytes than a conversion."""
    names = [_short_name(place.name) for place in places]
    counts = Counter(
        name.lower() for name in names
    )  # torch looks records up without regard to case
    for reason, wrong in (
        (
            "the archive has records whose names are equal, or differ in upper and lower case only",
            [name for name in names if counts[name.lower()] > 1],
        ),
        (
            "the archive has records that belong to no tensor",
            [name for name in names if name.startswith("data/") and name not in known],
        ),
    ):
        if wrong:
            raise CheckpointError(reason, archive.path, names=tuple(sorted(wrong)))
    for place in places:
        order = _short_name(place.name) == "byteorder"
        if order and archive.read(place.begin, place.begin + place.nbytes) != b"little":
            raise CheckpointError("its bytes are in big-endian order", archive.path)


def _payload(name: str, tensor: PickledTensor, path: str, place: Span | None) -> Payload:
    """Return the location of a tensor's elements; CheckpointError if they are not in one range of the file."""
    import torch

    from tensorferry.base.ranges import memory_order
    from tensorferry.checkpoint.zipformat.blobs import Payload

    entry = _entry(name, tensor, path, place)
    (shard,) = entry.shards
    dims: tuple[int, ...] | None = tuple(range(len(tensor.sizes)))
    if entry.nbytes:
        dims = memory_order(tensor.sizes, tensor.strides)
        if shard.file is None:
            raise CheckpointError("its bytes are not in the file", path, names=(name,))
        if dims is None:
            reason = "its elements have gaps or share memory: save a contiguous copy of it"
            raise CheckpointError(reason, path, names=(name,))
    if tensor.neg:
        try:
            torch.zeros(1, dtype=tensor.dtype).neg()
        except RuntimeError:
            reason = f"it has the negative bit, but torch cannot negate {tensor.dtype}"
            raise CheckpointError(reason, path, names=(name,)) from None
    bits = {"conj": tensor.conj, "neg": tensor.neg}
    return Payload(shard.begin, entry.nbytes, tensor.dtype, tensor.sizes, dims or (), **bits)


def _entry(name: str, tensor: PickledTensor, path: str, place: Span | None) -> Entry:
    """Return the entry of a tensor whose storage is the record ``place``."""
    _, storage_dtype, _, _, count = tensor.storage
    itemsize, sizes = tensor.dtype.itemsize, tensor.sizes
    numbers = (count, tensor.offset, *sizes, *tensor.strides)
    if max(numbers) > _MAX_NBYTES or len(sizes) > _MAX_DIMS:  # also keeps the product below cheap
        raise CheckpointError("it is larger than a tensor can be", path, names=(name,))
    nbytes = math.prod(sizes) * itemsize
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, tensor.strides, strict=True))
    first = tensor.offset * itemsize
    end = first + (span if nbytes else 0) * itemsize
    if nbytes > _MAX_NBYTES or end > count * storage_dtype.itemsize:
        raise CheckpointError("it extends beyond its storage", path, names=(name,))
    if place is not None and place.nbytes != count * storage_dtype.itemsize:
        reason = f"the size of the record {place.name!r} is not the one in the pickle"
        raise CheckpointError(reason, path, names=(name,))
    kind = str(tensor.dtype).removeprefix("torch.")
    offsets = (0,) * len(sizes)
    if place is None:
        shard = Shard(offsets, sizes, None)
    else:
        shard = Shard(offsets, sizes, Path(path).name, place.begin + first, place.begin + end)
    return Entry(name, kind, sizes, nbytes, (shard,))


class _OpenArchive:
    """An archive that is open for reading."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.read, self.nbytes = zips.reader_of(file)

    def places(self, damaged: Callable[[str, int, int, str], None] | None = None) -> list[Span]:
        """Return the locations of the records; for ``damaged`` see :func:`zips.layout`."""
        try:
            return zips.layout(self.read, self.nbytes, damaged)
        except (UnknownArchiveError, struct.error) as error:
            raise CheckpointError(
                self._truncation() or f"its directory is damaged: {error}", self.path
            ) from None
        except OSError as error:
            error.filename = error.filename or self.path
            raise

    def tensors(
        self, places: list[Span], others: list[str] | None = None
    ) -> list[tuple[str, PickledTensor]]:
        """Return the tensors in the pickle, by names made of the keys that lead to them.

        With ``others``, that gets the names of all objects that are not tensors, and tensors that are not plain raise
        CheckpointError.
        """
        from tensorferry.checkpoint.zipformat.blobs import Describer

        pickles = [place for place in places if place.name.partition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or pickles[0].nbytes > _MAX_PICKLE_NBYTES:
            raise CheckpointError(
                "it has no pickle, or one that is too large to inspect", self.path
            )
        name, begin, nbytes, crc = pickles[0]
        data = self.read(begin, begin + nbytes)
        if crc != 0 and crc32(data) != crc:
            reason = f"its CRC-32 is {crc32(data):08x} instead of {crc:08x}"
            raise CheckpointError(reason, self.path, names=(name,), begin=begin, end=begin + nbytes)
        try:
            root = Describer(data, _find_any).load()
        except (MalformedError, RefusedError) as error:
            raise CheckpointError(f"its pickle cannot be read ({error})", self.path) from None
        return _Tree(self.path, others).tensors(root)

    def _truncation(self) -> str | None:
        """Return a message if the archive's end is missing, or is not at the end of the file."""
        begin = max(0, self.nbytes - _TAIL_NBYTES)
        tail = self.read(begin, self.nbytes)
        if zips.ends(tail):
            return None
        at = zips.find_end(tail)
        if at < 0:
            return "its end is missing: the file was cut short, or never written completely"
        if at + zips.END.size > len(tail):
            return "its last bytes are missing: the file was cut short"
        return f"there are {len(tail) - at - zips.END.size} bytes after its end"


def _find_any(name: str) -> Any:
    """Return a stand-in for any class or function."""
    from tensorferry.checkpoint.zipformat.blobs import TENSORS, torch_constant

    if name in ("collections.OrderedDict", "collections.defaultdict"):
        return stand_in(name, lambda *_: _Dict())
    if name in _TENSOR_MAKERS:
        return stand_in(name, _TENSOR_MAKERS[name])
    return TENSORS.get(name) or torch_constant(name) or inert(name)


class _Dict(dict[Any, Any]):
    """An OrderedDict or defaultdict; the attribute ``_metadata`` of a state_dict() is dropped."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or state.keys() - {"_metadata"}:
            self[Inert("attributes", ())] = state


def _parameter(data: Any, _grad: Any, hooks: Any, state: Any = None) -> Any:
    return Inert("torch._utils._rebuild_parameter", (data,)) if hooks or state else data


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Make a subclass of tensors, or a tensor with attributes."""
    made = function(*arguments)
    attributes = state.keys() - _OF_BUFFERS if type(state) is dict else state
    is_plain = not attributes and getattr(kind, "name", "") in _PLAIN
    return made if is_plain else Inert("torch._tensor._rebuild_from_type_v2", (made, state))


_TENSOR_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}


class _Tree:
    """Finds the tensors in the containers and objects of a pickle, by names such as "model.layers.0.weight".

    For ``others`` see :meth:`_OpenArchive.tensors`.
    """

    def __init__(self, path: str, others: list[str] | None) -> None:
        self._path, self._others = path, others
        self._found: list[tuple[str, Any]] = []
        self._count = 0
        self._above: set[int] = set()  # the ids of the containers around what is visited

    def tensors(self, root: Any) -> list[tuple[str, Any]]:
        """Return the tensors in the order of the pickle."""
        self._visit("", root, self._others)
        return self._found

    def _visit(self, name: str, value: Any, others: list[str] | None) -> None:
        from tensorferry.checkpoint.zipformat.blobs import PickledTensor

        self._count += 1
        if self._count > _MAX_NODES:
            reason = "its pickle has more than a million tensors and containers"
            raise CheckpointError(reason, self._path)
        children: Any = ()
        if type(value) is PickledTensor:
            self._found.append((name or _ITSELF, value))
            if self._others is not None and value.more:
                raise self._error("it is a tensor with hooks or attributes", name)
            return
        if isinstance(value, dict):
            children = value.items()
        elif type(value) in (list, tuple):
            children = enumerate(value)
        elif isinstance(value, Inert):
            children = [*((None, each) for each in value.parts), *value.items]
            if self._others is not None and "._rebuild_" in value.called:
                raise self._error(f"it is an unknown kind of tensor ({value.called})", name)
        if others is not None and (isinstance(value, Inert) or (not children and self._above)):
            others.append(name or _ITSELF)
        if isinstance(value, Inert):
            others = None  # it is lost as a whole
        if id(value) in self._above or len(self._above) == _MAX_DEPTH:
            if self._others is not None and children:
                reason = f"it is nested in itself, or in {_MAX_DEPTH} containers, and would be lost"
                raise self._error(reason, name)
            return
        if not children:
            return
        self._above.add(id(value))
        for key, child in children:
            self._visit(_join_name(name, key), child, others)
        self._above.remove(id(value))

    def _error(self, reason: str, name: str) -> CheckpointError:
        return CheckpointError(reason, self._path, names=(name or _ITSELF,))


def _join_name(name: str, key: Any) -> str:
    if key is None:  # a part of an object
        return name
    known = type(key) is str or (type(key) is int and abs(key) < 1 << 64)
    part = str(key)[:_MAX_NAME] if known else "?"
    whole = f"{name}.{part}" if name else part
    return whole if len(whole) <= _MAX_NAME else f"{whole[: _MAX_NAME - 1]}…"


class _ReadRange(NamedTuple):
    """A piece: a part of a record, or the bytes between records."""

    place: int | None  # the number of the record
    begin: int
    nbytes: int


class _ArchiveAudit(Audit):
    def __init__(self, path: str, file: BinaryIO, progress: Listener | None) -> None:
        super().__init__(path, progress)
        self._archive = _OpenArchive(path, file)
        self.meter.expect(self._archive.nbytes, 1)
        self._damage: list[tuple[int, int, str, str]] = []  # begin, end, record, reason

    def run(self) -> Report:
        try:
            places = self._archive.places(self._damaged)
        except (CheckpointError, OSError) as error:
            self.problem(error)
            return self.report
        self.report.entries = len(places) + len(self._damage)
        unverified = []
        for place, crc in zip(places, self._crcs(places), strict=True):
            if crc is None:
                continue
            if crc == place.crc:
                self.report.nbytes += place.nbytes
            elif place.crc == 0:  # torch's compute_crc32 was off
                unverified.append(place.name)
            else:
                problem = f"its CRC-32 is {crc:08x} instead of {place.crc:08x}"
                self._damaged(place.name, place.begin, place.begin + place.nbytes, problem)
        names = self._names(places) if self._damage or unverified else {}
        for begin, end, record, reason in sorted(self._damage):
            self.problem(
                CheckpointError(
                    reason,
                    self.report.path,
                    names=(record, *names.get(_short_name(record), ())),
                    begin=begin,
                    end=end,
                )
            )
        for record in unverified:
            known = names.get(_short_name(record), [])[:_SHOWN_TENSORS]
            self.report.unverified.append(f"{record} ({', '.join(known)})" if known else record)
        return self.finish()

    def _damaged(self, record: str, begin: int, end: int, reason: str) -> None:
        self._damage.append((begin, end, record, reason))

    def _crcs(self, places: list[Span]) -> list[int | None]:
        """Return the CRC-32 of each record; None for a record that cannot be read, which is added to the damage."""
        crcs: list[int | None] = [0] * len(places)
        pieces = list(_pieces(places))
        with reopen(self._archive.file) as file:
            found = piece_crcs(
                file, pieces[0].begin if pieces else 0, [piece.nbytes for piece in pieces]
            )
            for (index, begin, nbytes), crc in zip(pieces, found, strict=True):
                self.meter.add(begin + nbytes - self.meter.nbytes)
                before = None if index is None else crcs[index]
                if index is None or before is None:
                    continue
                if isinstance(crc, int):
                    crcs[index] = crc32_combine(before, crc, nbytes)
                else:
                    crcs[index] = None
                    reason = f"it cannot be read: {crc.strerror}"
                    self._damaged(places[index].name, begin, begin + nbytes, reason)
        self.meter.add(self._archive.nbytes - self.meter.nbytes, files=1)
        return crcs

    def _names(self, places: list[Span]) -> dict[str, list[str]]:
        """Return the names of the tensors in each record; an empty dict if the pickle cannot be read."""
        names: dict[str, list[str]] = {}
        try:
            found = self._archive.tensors(places)
        except (CheckpointError, OSError, ImportError):
            return names
        for name, tensor in found:
            names.setdefault(_record_of(tensor), []).append(name)
        return names


def _pieces(places: list[Span]) -> Iterator[_ReadRange]:
    """Split a file, from the first record to the last, into pieces."""
    at = places[0].begin if places else 0
    for index, place in enumerate(places):
        if place.begin > at:
            yield _ReadRange(None, at, place.begin - at)
        at, end = place.begin, place.begin + place.nbytes
        while at < end:
            nbytes = min(_PIECE_NBYTES, end - at)
            yield _ReadRange(index, at, nbytes)
            at += nbytes


def _short_name(record: str) -> str:
    """Return a record's name without the prefix with the archive's name."""
    return record.partition("/")[2]


def _record_of(tensor: PickledTensor) -> str:
    """Return the short name of the record that holds a tensor's storage."""
    return f"data/{tensor.storage[2]}"
