"""The lookup of a model's files and tensors, for loads, `ls`, `verify`, `convert`, and saves that replace a model.

A source is a file, several files, the index of a sharded model, or a folder. In a folder with an index, the model
consists of the files that the index names. In a folder without an index, it consists of all safetensors files: numbered
files must be complete, and no two files may have the same tensor. A folder is ambiguous, and is refused, in two cases:
it has a model.safetensors, which transformers would prefer, and an index of other files; or it has files of ranks and
an index that does not name them.

Files of ranks contain parts of tensors: each rank of a distributed save writes its own file. The files of ranks in a
source must be all files of one save, as far as their headers identify the save, and the parts of each tensor must cover
the tensor exactly.
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
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.transfer.remote import Version, as_path, source_path
from tensorferry.transfer.versioned import VersionedFile

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from tensorferry.base.checks import Direct
    from tensorferry.transfer.files import File

Source: TypeAlias = "Readable | Sequence[Readable]"
Look: TypeAlias = "Callable[[str], tuple[header.Header, Version] | None]"

PARTS, PARTS_VERSION, OFFSETS = "DCP_SHARDING_INFO", "DCP_VERSION", "saved_offsets"
"""The keys that torch's writer (its module _hf_utils) uses in the metadata of files with parts of tensors.

OFFSETS is a key in the JSON value of PARTS. The others are keys of the metadata.
"""

SAVE = "tensorferry_save"
"""The metadata key of tensorferry's files of ranks: the name of the save, a slash, and the number of its files."""

WHOLE = "tensorferry_whole"
"""The metadata key for the shapes of the complete tensors.

A rank writes this key instead of SAVE if it has no name of the save, or if its name may be that of an earlier save.
"""

_KEYS_OF_PARTS = {PARTS, PARTS_VERSION, SAVE, WHOLE}
_MAX_CELLS = 1_000_000  # limits the time and memory of tiles() for hostile headers


class Stored(NamedTuple):
    """A tensor or a part of one, with the file that contains it."""

    path: str
    file_nbytes: int
    tensor: header.Tensor
    version: Version  # the version of the file when its header was read
    # The offsets of a part in the complete tensor, if the header has them.
    offsets: tuple[int, ...] | None = None

    def open(self, *, direct: Direct = "auto", mode: str = "r") -> File:
        """Open the file; raise SafetensorError if it has changed since its header was read.

        In a mode for reading only, each read raises this error, too.
        """
        if mode in ("r", "rb"):
            return VersionedFile(self.path, direct=direct, version=self.version, changed=changed)
        file = tensorferry.open(self.path, mode, direct=direct)
        if Version.of(file) != self.version:
            file.close()
            raise changed(self.path)
        return file


def changed(path: str) -> SafetensorError:
    """Return the error for a file that is not the one whose header was read."""
    return SafetensorError(
        "it was replaced or changed after its header was read (remedy: load it again)", path
    )


class Files(NamedTuple):
    """The paths of a model's files and, if there is an index, the path of each tensor's file."""

    paths: list[str]
    owners: dict[str, str] | None = None


class Contents(NamedTuple):
    """The tensors and the metadata of a source.

    Attributes
    ----------
    tensors : dict of str to (tuple of int, list of Stored)
        The shape of each tensor, in the header's elements, and its parts. The order is that of files and offsets.
    metadata : dict of str to str
        The metadata of all files, without the keys that describe parts.
    differing : set of str
        The keys of the metadata that have different values in different files.
    """

    tensors: dict[str, tuple[tuple[int, ...], list[Stored]]]
    metadata: dict[str, str]
    differing: set[str]


def look(
    path: str, check: Callable[[bytes, str], None] | None = None
) -> tuple[header.Header, Version]:
    """Return the header of a file, which ``check`` may refuse before it is parsed, and the version of the file."""
    file = VersionedFile(path, changed=changed)
    with file:
        return header.read(file, check), file.version


class StoredTensors(dict[str, Stored]):
    """The tensors of a model by name, in the order of the files and of the offsets in each file.

    Attributes
    ----------
    metadata : dict of str to str
        The metadata of all files.
    """

    def __init__(self, found: dict[str, Stored], metadata: dict[str, str]) -> None:
        super().__init__(found)
        self.metadata = metadata

    def hint(self, name: str) -> str:
        """Return, for a message about a missing tensor, whether it is an alias; see :func:`alias_hint`."""
        return alias_hint(name, self.metadata, self)

    def missing(self, name: str) -> SafetensorError:
        """Return the error for a tensor that does not exist."""
        return SafetensorError(f"no file has a tensor of this name{self.hint(name)}", name=name)


def stored_tensors(source: Source, look: Look = look) -> StoredTensors:
    """Return all tensors of a model's files.

    Parameters
    ----------
    source : path or sequence of paths
        Files, an index (``model.safetensors.index.json``), or a directory. In a directory without an index, all
        ``*.safetensors`` files are used, in the order of their names.
    look : function of a path
        As for :func:`contents_of`.

    Raises
    ------
    SafetensorError
        A header or the index is invalid, two files have the same tensor, a tensor is divided into parts, or a directory
        is empty, incomplete or ambiguous.
    StorageError
        A file cannot be read.
    """
    found = {}
    contents = contents_of(source, look=look)
    for name, (_, parts) in contents.tensors.items():
        if len(parts) > 1:
            raise SafetensorError(
                "it is divided into parts that several ranks have saved (remedy: join them with tensorferry convert)",
                parts[0].path,
                name=name,
            )
        found[name] = parts[0]
    return StoredTensors(found, contents.metadata)


def alias_hint(name: str, metadata: Mapping[str, str] | None, names: Container[str]) -> str:
    """Return, for the error about a missing tensor, that it is another name of a tensor, or an empty text.

    Of several tensors in the same memory (tied weights), writers save one, and map the names of the others to it in the
    metadata.
    """
    kept = (metadata or {}).get(name)
    if kept is None or kept not in names:
        return ""
    return f" (the metadata map it to {shortened(kept)}, the one that was saved of several in the same memory)"


def fail(error: SafetensorError) -> None:
    """Raise an error. This is the default for the parameter ``problem`` of :func:`contents_of`."""
    raise error


def contents_of(
    source: Source,
    *,
    complete: bool = False,
    together: bool = True,
    look: Look = look,
    problem: Callable[[SafetensorError], None] = fail,
) -> Contents:
    """Read the headers of a source, and return its tensors and metadata.

    Parameters
    ----------
    source : path or sequence of paths
        As for :func:`stored_tensors`.
    complete : bool
        Whether it is a problem if a file that the index names has a tensor that the index does not name. Otherwise such
        tensors are ignored.
    together : bool
        Whether files without an index are one model, in which tensor names are unique.
    look : function of a path
        Returns the header and the version of a file, or None if they are unavailable. If it returns None, the tensors
        of that file are not reported as missing.
    problem : function of a SafetensorError
        Called with each inconsistency. By default it is raised.

    Raises
    ------
    SafetensorError
        A header or the index is invalid, or a directory is empty, incomplete or ambiguous.
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
        file_metadata = head.metadata or {}
        parts = _HeaderParts(file_metadata, path)
        if SAVE in file_metadata or index.RANKS_FILE.fullmatch(as_path(path).name):
            saves.setdefault(file_metadata.get(SAVE), []).append(path)
        for key, value in file_metadata.items():
            if key not in _KEYS_OF_PARTS and metadata.setdefault(key, value) != value:
                differing.add(key)
        for name, tensor in head.tensors.items():
            owner = path if owners is None else owners.get(name)
            if owner == path:
                stored = Stored(path, head.file_nbytes, tensor, version, parts.offsets(tensor))
                found.setdefault(name, []).append(stored)
                shapes |= parts.complete_shape(tensor)
            elif owner is None and complete:
                reason = "the index does not name it, so it may belong to another model"
                problem(SafetensorError(reason, path, name=name))
    for name, path in (owners or {}).items():
        if name not in found and path not in unknown:
            reason = "the file does not contain it, although the index says so"
            problem(SafetensorError(reason, path, name=name))
    if not unknown:
        _check_saves(saves, problem)
    tensors = {}
    for name, stored_parts in found.items():
        shape = shapes.get(name) or _bounding_shape(stored_parts)
        tensors[name] = shape, stored_parts
        if (len(stored_parts) > 1 or shape != stored_parts[0].tensor.shape) and not unknown:
            _check_parts(shape, stored_parts, together, problem)
    return Contents(tensors, metadata, differing)


def files_of(source: Source) -> Files:
    """Return the files of the model. Errors are as for :func:`contents_of`."""
    if isinstance(source, (list, tuple)) and not is_pair(source):
        paths = [source_path(path) for path in source]
        if not paths:
            raise ValueError("files: the list is empty")
        if len(paths) != len(set(paths)):
            raise ValueError("files: the list has a duplicate")
        return Files(paths)
    path = source_path(source)  # type: ignore[arg-type]
    if path.endswith(".json"):
        return _indexed(path)
    folder = as_path(path)
    if (path.endswith(index.FILE_SUFFIX) and is_url(path)) or not folder.is_dir():
        return Files([path])
    names, indexes = index.names_in(folder)
    if len(indexes) > 1:
        raise SafetensorError(
            f"it has several indexes, {', '.join(indexes)}: give one of them", path
        )
    if indexes:
        return _beside_index(folder, indexes[0], names)
    if not names:
        raise SafetensorError("there is neither an index nor any .safetensors file", path)
    if index.SINGLE_NAME in names:
        return Files([str(folder / index.SINGLE_NAME)])
    # A killed save may have left files that no index names.
    names = [name for name in names if not index.is_own(name)] or names
    _check_numbers((name for name in names if not index.RANKS_FILE.fullmatch(name)), path)
    return Files([str(folder / name) for name in names])


def _beside_index(folder: pathlib.Path, index_name: str, names: list[str]) -> Files:
    """Return the files that a folder's index names. Raise SafetensorError if the folder is ambiguous."""
    path = str(folder / index_name)
    found = _indexed(path)
    assert found.owners is not None
    named = {as_path(each).name for each in found.paths}
    single = index_name.removesuffix(".index.json")
    has_single = single in names and single not in named
    if all(map(index.is_own, named)):
        # Only a save of this library has written the index. It then removes the older model.safetensors, which counts
        # until it has been removed, and counts if it was written later by another library.
        return Files([str(folder / single)]) if has_single else found
    ranks = [name for name in names if index.RANKS_FILE.fullmatch(name) and name not in named]
    if ranks:
        raise SafetensorError(
            f"the folder has an index, and files that the ranks of a distributed save wrote ({ranks[0]}). Only one of "
            "them is the current model (remedy: move the old files away, or give the path of the index)",
            str(folder),
        )
    if not has_single:
        return found
    if named.isdisjoint(names):
        # Some libraries that replace a model with a smaller one remove its files but leave the index.
        head, _ = look(str(folder / single))
        if found.owners.keys() <= head.tensors.keys():
            return Files([str(folder / single)])
    raise SafetensorError(
        f"the folder has {single}, and an index that names other files. Only one of them is the current model (remedy: "
        "move the old files away, or give the path of the file or the index)",
        str(folder),
    )


def _indexed(path: str) -> Files:
    """Return the files that an index names. Raise SafetensorError if the folder has more files of the same model."""
    folder = as_path(path).parent
    weights = index.read(path)
    if not weights:
        raise SafetensorError("the index does not name any tensor", path)
    named = set(weights.values())
    groups = _groups(named)
    for name in sorted({*index.names_in(folder)[0]} - named):
        if groups.keys() & _groups([name]).keys():
            raise SafetensorError(
                f"the folder has the file {name!r}, which by its name belongs to the model, but the index does not "
                "name it",
                path,
            )
    owners = {name: str(folder / file_name) for name, file_name in weights.items()}
    return Files(sorted(set(owners.values())), owners)


def _groups(names: Iterable[str]) -> dict[tuple[str, int], set[int]]:
    """Group the names of numbered files by prefix and count, and return the numbers that exist in each group."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := index.ONE_OF_SEVERAL.fullmatch(name):
            numbers.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    return numbers


def _check_numbers(names: Iterable[str], folder: str) -> None:
    """Raise SafetensorError if the names are those of numbered files, and a number is missing."""
    for (prefix, count), known in _groups(names).items():
        if len(known) < count:
            missing = next(number for number in range(1, count + 1) if number not in known)
            raise SafetensorError(
                f"it has no index, and of the {count} files {prefix}-?????-of-{count:05d}.safetensors number {missing} "
                "is missing",
                folder,
            )


def _check_saves(
    saves: dict[str | None, list[str]], problem: Callable[[SafetensorError], None]
) -> None:
    """Check that the files of ranks are all files of one save, as far as their headers identify it."""
    if len(saves) > 1:
        (first, *_), (other, *_) = list(saves.values())[:2]
        reason = f"it belongs to another save than {first!r}: one was killed, or is in progress"
        problem(SafetensorError(reason, other))
    for save, paths in saves.items():
        count = (save or "").partition("/")[2]
        if len(saves) == 1 and count and count != str(len(paths)):
            reason = f"its save had {count[:20]} files, of which {len(paths)} exist"
            problem(SafetensorError(reason, paths[0]))
    # The headers that torch writes do not identify the save. A rank may lack files with some of the numbers, but at
    # least one rank must have a file with each number.
    unnamed = [as_path(path) for path in saves.get(None, ())]
    ranks = filter(None, (index.RANKS_FILE.fullmatch(path.name) for path in unnamed))
    _check_numbers((found[1] for found in ranks), str(unnamed[0].parent) if unnamed else "")


class _HeaderParts:
    """The validated metadata in a file's header that describe parts of tensors."""

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
        """Return the offsets of a part in the complete tensor, or None if the header does not describe parts."""
        if self._parts is None:
            return None
        part = self._parts.get(tensor.name) if isinstance(self._parts, dict) else None
        return self._numbers(part.get(OFFSETS) if isinstance(part, dict) else None, tensor, PARTS)

    def complete_shape(self, tensor: header.Tensor) -> dict[str, tuple[int, ...]]:
        """Return a dict with the shape of the complete tensor by its name, or an empty dict if it is unknown."""
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
            reason = f"its {key} does not have one valid number for each dimension"
            raise SafetensorError(reason, self._path, name=tensor.name)
        return header_shape(found, tensor.dtype) if found else ()


def _bounding_shape(stored: list[Stored]) -> tuple[int, ...]:
    """Return the smallest shape that contains all parts."""
    first = stored[0]
    if len(stored) == 1 and not any(first.offsets or ()):
        return first.tensor.shape
    ends = (map(operator.add, *_box(each)) for each in stored)
    return tuple(map(max, zip(*ends, strict=False)))


def _box(stored: Stored) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets of a part in the complete tensor, and its sizes."""
    shape = stored.tensor.shape
    return stored.offsets or (0,) * len(shape), shape


def _check_parts(
    shape: tuple[int, ...],
    stored: list[Stored],
    together: bool,
    problem: Callable[[SafetensorError], None],
) -> None:
    """Check that parts cover a tensor exactly. If they do not, report the first problem that explains it."""
    first, seen = stored[0], set()
    kinds = {(each.tensor.dtype, len(each.tensor.shape)) for each in stored}
    whole = next((each for each in stored if each.offsets is None), None)
    if whole is None and len(kinds) == 1 and tiles(shape, map(_box, stored)):
        return
    reason, path = f"parts of it are missing: they do not cover {list(shape)}", first.path
    for each in stored[1:]:
        if whole is not None or _box(each) in seen or _box(each) == _box(first):
            reason, path = f"it is also in {first.path!r}", each.path
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
            reason, path = f"it is {here} in this file, and {there} in another one", each.path
            break
    if together or whole is None:
        problem(SafetensorError(reason, path, name=first.tensor.name))


def tiles(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether boxes cover a shape exactly, without overlap. Each box consists of offsets and sizes.

    The result is also False if checking would need too many steps.
    """
    non_empty = [(offsets, sizes) for offsets, sizes in boxes if all(sizes)]
    if sum(math.prod(sizes) for _, sizes in non_empty) != math.prod(shape):
        return False
    if not non_empty:
        return True
    # The begins and ends of all boxes divide the shape into a grid. As the volumes add up, the boxes cover the shape if
    # none of them is outside and no cell of the grid is in two of them.
    numbers = [
        {cut: number for number, cut in enumerate(sorted({0, *ends}))}
        for ends in (
            itertools.chain.from_iterable((o[dim], o[dim] + s[dim]) for o, s in non_empty)
            for dim in range(len(shape))
        )
    ]
    if any(max(cuts) != size for cuts, size in zip(numbers, shape, strict=True)):
        return False
    seen: set[tuple[int, ...]] = set()
    for offsets, sizes in non_empty:
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
