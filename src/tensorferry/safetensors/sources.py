"""What tensors a place holds: one answer for loads, `ls`, `verify`, `convert`, and saves that replace a model.

A place is a file, several files, a sharded model's index, or a folder. In a folder the index says which files are the
model, and others beside it are not part of it. Without an index all safetensors files are; numbered ones must be there
from the first to the last, and no two files may have the same tensor. Where a folder could be read in two ways it is
refused: a model.safetensors beside an index of other files, which transformers would load instead, or files of ranks
beside an index.

Files of ranks have parts of tensors. They must be all files of one save, as far as these say it, and the parts of a
tensor must fill it exactly.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import tensorferry
from tensorferry.base.checks import Readable, is_pair, is_url
from tensorferry.safetensors import header, index
from tensorferry.safetensors.dtypes import DTYPES, header_shape
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.transfer.remote import Version, place, source_path

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.transfer.files import File

Source: TypeAlias = "Readable | Sequence[Readable]"

PARTS, PARTS_VERSION, OFFSETS = "DCP_SHARDING_INFO", "DCP_VERSION", "saved_offsets"
"""What torch's writer puts into headers of files that have parts of tensors (its module _hf_utils)."""

SAVE = "tensorferry_save"
"""What ours puts into those of ranks: the name of their save, a slash, and how many files it has."""

WHOLE = "tensorferry_whole"
"""Or the shapes of the whole tensors, where a rank does not know the save."""

_OF_PARTS = {PARTS, PARTS_VERSION, SAVE, WHOLE}
_MAX_CELLS = 1_000_000


class Stored(NamedTuple):
    """A tensor or a part of one, and which of a source's files has it."""

    path: str
    file_nbytes: int
    tensor: header.Tensor
    version: Version  # of the file when its header was read
    # Where in the whole tensor it begins, if the file says so.
    offsets: tuple[int, ...] | None = None

    def open(self, **options: Any) -> File:
        """Open its file, which must be the one whose header was read; ``options`` are those of `tensorferry.open`."""
        file = tensorferry.open(self.path, **options)
        try:
            self.check(file)
        except BaseException:
            file.close()
            raise
        return file

    def check(self, file: File) -> None:
        """Raise SafetensorError where the file that is open now is not the one whose header was read."""
        if Version.of(file) != self.version:
            raise SafetensorError(
                "it was replaced or changed after its header was read (remedy: load it again)",
                self.path,
            )


class Files(NamedTuple):
    """Which files are a model, and where there is an index which of them has which tensor."""

    paths: list[str]
    owners: dict[str, str] | None = None


class Held(NamedTuple):
    """What tensors a place holds.

    Attributes
    ----------
    tensors : dict of str to (tuple of int, list of Stored)
        The shape of each tensor, as headers have shapes, and its parts; in the order of the files and of their bytes.
    metadata : dict of str to str
        What the writers of the files have added, but for what concerns parts.
    differing : set of str
        Those keys of it that have other values in other files.
    """

    tensors: dict[str, tuple[tuple[int, ...], list[Stored]]]
    metadata: dict[str, str]
    differing: set[str]


def stored_tensors(source: Source) -> dict[str, Stored]:
    """Return all tensors of a model's files, in the order of the files and within each by offset.

    Parameters
    ----------
    source : path or sequence of paths
        Files; or one index (``model.safetensors.index.json``); or one directory with an index or, where there is none,
        with ``*.safetensors`` files, which are taken in the order of their names.

    Raises
    ------
    SafetensorError
        A header or the index is wrong, two files have the same tensor, a tensor is in parts, or a directory has nothing
        to read, lacks files, or could be read in two ways.
    StorageError
        A file cannot be read.
    """
    found = {}
    for name, (_, parts) in hold(source).tensors.items():
        if len(parts) > 1:
            raise SafetensorError(
                "it is in parts, of which each rank has saved one (remedy: put them together by tensorferry convert)",
                parts[0].path,
                name=name,
            )
        found[name] = parts[0]
    return found


def look(path: str) -> tuple[header.Header, Version]:
    """Return a file's header, and which file it was."""
    with tensorferry.open(path) as file:
        version = Version.of(file)
        return header.read(file), version


def fail(error: SafetensorError) -> None:
    """Raise an error."""
    raise error


def hold(
    source: Source,
    *,
    complete: bool = False,
    together: bool = True,
    look: Callable[[str], tuple[header.Header, Version] | None] = look,
    problem: Callable[[SafetensorError], None] = fail,
) -> Held:
    """Return what tensors a place holds.

    Parameters
    ----------
    source : path or sequence of paths
        As for :func:`stored_tensors`.
    complete : bool
        Whether a tensor that an index does not name, of a file that it names, is a problem; else it is passed over.
    together : bool
        Whether files without an index are one model, in which no tensor is twice.
    look : function of a path
        Returns a file's header, or None where that cannot be had, and what it would have is not missed.
    problem : function of a SafetensorError
        Told what does not go together; by default that is raised.

    Raises
    ------
    SafetensorError
        A header or the index is wrong, or a directory has nothing to read, lacks files, or could be read in two ways.
    StorageError
        A file cannot be read.
    """
    paths, owners = files_of(source)
    found: dict[str, list[Stored]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    metadata: dict[str, str] = {}
    differing: set[str] = set()
    saves: dict[str | None, list[str]] = {}
    unknown = set()
    for path in paths:
        seen = look(path)
        if seen is None:
            unknown.add(path)
            continue
        head, version = seen
        said = head.metadata or {}
        parts = _HeaderParts(said, path)
        if SAVE in said or index.RANKS_FILE.fullmatch(place(path).name):
            saves.setdefault(said.get(SAVE), []).append(path)
        for key, value in said.items():
            if key not in _OF_PARTS and metadata.setdefault(key, value) != value:
                differing.add(key)
        for name, tensor in head.tensors.items():
            owner = path if owners is None else owners.get(name)
            if owner == path:
                stored = Stored(path, head.file_nbytes, tensor, version, parts.offsets(tensor))
                found.setdefault(name, []).append(stored)
                shapes |= parts.whole(tensor)
            elif owner is None and complete:
                reason = (
                    "the index does not name it, and would have it left out: it is of another model"
                )
                problem(SafetensorError(reason, path, name=name))
    for name, path in (owners or {}).items():
        if name not in found and path not in unknown:
            reason = "the index says that it is here, and it is not"
            problem(SafetensorError(reason, path, name=name))
    if not unknown:
        _check_saves(saves, problem)
    tensors = {}
    for name, all_of_it in found.items():
        shape = shapes.get(name) or _whole(all_of_it)
        tensors[name] = shape, all_of_it
        if (len(all_of_it) > 1 or shape != all_of_it[0].tensor.shape) and not unknown:
            _check_parts(shape, all_of_it, together, problem)
    return Held(tensors, metadata, differing)


def files_of(source: Source) -> Files:
    """Return which files are the model; errors as for :func:`hold`."""
    if isinstance(source, (list, tuple)) and not is_pair(source):
        paths = [source_path(path) for path in source]
        if not paths:
            raise ValueError("files: there are none")
        if len(paths) != len(set(paths)):
            raise ValueError("files: one is given twice")
        return Files(paths)
    path = source_path(source)  # type: ignore[arg-type]
    if path.endswith(".json"):
        return _indexed(path)
    folder = place(path)
    if (path.endswith(index.FILE_SUFFIX) and is_url(path)) or not folder.is_dir():
        return Files([path])
    names, indexes = index.names_in(folder)
    if len(indexes) > 1:
        raise SafetensorError(
            f"it has several indexes, {', '.join(indexes)}: give one of them", path
        )
    if indexes:
        return _beside_index(folder, indexes[0], names)
    names = [name for name in names if not index.is_aside(name)]
    if not names:
        raise SafetensorError("there is neither an index nor any .safetensors file", path)
    _check_numbers((name for name in names if not index.RANKS_FILE.fullmatch(name)), path)
    return Files([str(folder / name) for name in names])


def _beside_index(folder: pathlib.Path, index_name: str, names: list[str]) -> Files:
    """Return the files of a folder with an index: what that names, unless something else may be meant."""
    path = str(folder / index_name)
    found = _indexed(path)
    assert found.owners is not None
    named = {place(each).name for each in found.paths}
    ranks = [name for name in names if index.RANKS_FILE.fullmatch(name) and name not in named]
    if ranks:
        raise SafetensorError(
            f"it has an index and files of ranks ({ranks[0]}), and which are the newer ones is not known (remedy: move "
            "the others away, or give the index)",
            str(folder),
        )
    single = index_name.removesuffix(".index.json")
    if single not in names or single in named:
        return found
    coming = index.read(path)[1].get(index.COMING)
    if isinstance(coming, list):  # a save was killed, or is on its way
        return Files([str(folder / single)]) if single in coming else found
    if named.isdisjoint(names):
        # As libraries leave it that replace a model by a smaller one.
        head, _ = look(str(folder / single))
        if found.owners.keys() <= head.tensors.keys():
            return Files([str(folder / single)])
    raise SafetensorError(
        f"it has {single} and an index of other files, and which of them is the model is not known (remedy: move the "
        "others away, or give the file or the index)",
        str(folder),
    )


def _indexed(path: str) -> Files:
    folder = place(path).parent
    weights, _ = index.read(path)
    if not weights:
        raise SafetensorError("the index names no tensor", path)
    named = set(weights.values())
    groups = _groups(named)
    for name in sorted({*index.names_in(folder)[0]} - named):
        if groups.keys() & _groups([name]).keys():
            raise SafetensorError(f"the index does not name {name!r}, which is beside it", path)
    owners = {name: str(folder / file_name) for name, file_name in weights.items()}
    return Files(sorted(set(owners.values())), owners)


def _groups(names: Iterable[str]) -> dict[tuple[str, int], set[int]]:
    """Return the numbers of files that are a model together."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := index.ONE_OF_SEVERAL.fullmatch(name):
            numbers.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    return numbers


def _check_numbers(names: Iterable[str], folder: str) -> None:
    for (begin, count), known in _groups(names).items():
        if len(known) < count:
            missing = next(number for number in range(1, count + 1) if number not in known)
            raise SafetensorError(
                f"it has no index, and of the {count} files {begin}-?????-of-{count:05d}.safetensors number {missing} "
                "is not there",
                folder,
            )


def _check_saves(
    saves: dict[str | None, list[str]], problem: Callable[[SafetensorError], None]
) -> None:
    """Check that ranks' files are all files of one save, as far as they say so."""
    if len(saves) > 1:
        (first, *_), (other, *_) = list(saves.values())[:2]
        reason = f"it is not of the same save as {first!r}: one was killed, or is on its way"
        problem(SafetensorError(reason, other))
    for save, paths in saves.items():
        count = (save or "").partition("/")[2]
        if len(saves) == 1 and count and count != str(len(paths)):
            reason = f"its save had {count[:20]} files, of which {len(paths)} are there"
            problem(SafetensorError(reason, paths[0]))
    # torch's say nothing; each rank may lack some of the numbers, all together may not.
    unsaid = [place(path) for path in saves.get(None, ())]
    ranks = filter(None, (index.RANKS_FILE.fullmatch(path.name) for path in unsaid))
    _check_numbers((found[1] for found in ranks), str(unsaid[0].parent) if unsaid else "")


class _HeaderParts:
    """What a file's header says of the parts of tensors that it has, checked."""

    def __init__(self, metadata: dict[str, str], path: str) -> None:
        self._path = path
        self._parts = self._read(metadata, PARTS)
        self._whole = self._read(metadata, WHOLE)

    def _read(self, metadata: dict[str, str], key: str) -> Any:
        try:
            return json.loads(metadata[key]) if metadata.get(key) else None
        except (ValueError, RecursionError) as error:
            raise SafetensorError(f"its {key} cannot be read: {error}", self._path) from None

    def offsets(self, tensor: header.Tensor) -> tuple[int, ...] | None:
        """Return where in its whole tensor a part begins; None where nothing is said of parts."""
        if self._parts is None:
            return None
        part = self._parts.get(tensor.name) if isinstance(self._parts, dict) else None
        return self._numbers(part.get(OFFSETS) if isinstance(part, dict) else None, tensor, PARTS)

    def whole(self, tensor: header.Tensor) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole tensor by its name, if it is known."""
        if self._whole is None:
            return {}
        shape = self._whole.get(tensor.name) if isinstance(self._whole, dict) else None
        return {tensor.name: self._numbers(shape, tensor, WHOLE)}

    def _numbers(self, found: Any, tensor: header.Tensor, key: str) -> tuple[int, ...]:
        if (
            not isinstance(found, list)
            or len(found) != len(tensor.shape)
            or not all(type(each) is int and 0 <= each < 1 << 62 for each in found)
        ):
            reason = f"its {key} does not say where in the whole tensor it is"
            raise SafetensorError(reason, self._path, name=tensor.name)
        return header_shape(found, tensor.dtype) if found else ()


def _whole(stored: list[Stored]) -> tuple[int, ...]:
    """Return the shape that reaches as far as the parts do."""
    first = stored[0]
    if len(stored) == 1 and not any(first.offsets or ()):
        return first.tensor.shape
    ends = (map(operator.add, *_box(each)) for each in stored)
    return tuple(map(max, zip(*ends, strict=False)))


def _box(stored: Stored) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = stored.tensor.shape
    return stored.offsets or (0,) * len(shape), shape


def _check_parts(
    shape: tuple[int, ...],
    stored: list[Stored],
    together: bool,
    problem: Callable[[SafetensorError], None],
) -> None:
    """Check that parts fill a tensor exactly."""
    first, seen = stored[0], set()
    kinds = {(each.tensor.dtype, len(each.tensor.shape)) for each in stored}
    whole = next((each for each in stored if each.offsets is None), None)
    if whole is None and len(kinds) == 1 and tiles(shape, map(_box, stored)):
        return
    reason, path = f"parts of it are missing: they do not fill {list(shape)}", first.path
    for each in stored[1:]:
        if whole is not None or _box(each) in seen or _box(each) == _box(first):
            reason, path = f"it is in {first.path!r}, too", each.path
            break
        seen.add(_box(each))
        if (each.tensor.dtype, len(each.tensor.shape)) != (
            first.tensor.dtype,
            len(first.tensor.shape),
        ):
            here, there = (
                f"{DTYPES[one.tensor.dtype].torch or one.tensor.dtype} of {len(one.tensor.shape)} dimensions"
                for one in (each, first)
            )
            reason, path = f"it is {here} here, and {there} in another file", each.path
            break
    if together or whole is None:
        problem(SafetensorError(reason, path, name=first.tensor.name))


def tiles(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether boxes, each of them offsets and sizes, fill a shape exactly; False where that is hard to tell."""
    filled = [(offsets, sizes) for offsets, sizes in boxes if all(sizes)]
    if sum(math.prod(sizes) for _, sizes in filled) != math.prod(shape):
        return False
    if not filled:
        return True
    # The cuts of all boxes make a grid, of which no cell may be in two of them.
    numbers = [
        {cut: number for number, cut in enumerate(sorted({0, *ends}))}
        for ends in (
            itertools.chain.from_iterable((o[dim], o[dim] + s[dim]) for o, s in filled)
            for dim in range(len(shape))
        )
    ]
    if any(max(cuts) != size for cuts, size in zip(numbers, shape, strict=True)):
        return False
    seen: set[tuple[int, ...]] = set()
    for offsets, sizes in filled:
        cells = [
            range(cuts[offset], cuts[offset + size])
            for cuts, offset, size in zip(numbers, offsets, sizes, strict=True)
        ]
        count = len(seen) + math.prod(map(len, cells))
        if count > _MAX_CELLS:
            return False
        seen.update(itertools.product(*cells))
        if len(seen) < count:
            return False
    return True
