"""The files of one model: given as paths, as a sharded model's index, or as the directory that has either."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import tensorferry
from tensorferry.safetensors import header, index
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.version import Version
from tensorferry.transfers import Path, kept_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.files import File

Source: TypeAlias = "Path | Sequence[Path]"


class Stored(NamedTuple):
    """A tensor, and which of a source's files has it."""

    path: str
    file_nbytes: int
    tensor: header.Tensor
    version: Version  # of the file when its header was read

    def check(self, file: File) -> None:
        """Raise SafetensorError where the file that is open now is not the one whose header was read."""
        if Version.of(file) != self.version:
            raise SafetensorError(
                "it was replaced or changed after its header was read (remedy: load it again)",
                self.path,
            )


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
        A header or the index is wrong, two files have the same tensor, or a directory has nothing to read.
    StorageError
        A file cannot be read.
    """
    paths, owners = _files_of(source)
    found: dict[str, Stored] = {}
    for path in paths:
        with tensorferry.open(path) as file:
            version = Version.of(file)
            head = header.read(file)
        for name, tensor in head.tensors.items():
            if owners is not None and owners.get(name) != path:
                continue  # the index says which of several it is
            if name in found:
                raise SafetensorError(f"it is in {found[name].path!r}, too", path, name=name)
            found[name] = Stored(path, head.file_nbytes, tensor, version)
    for name, path in (owners or {}).items():
        if name not in found:
            raise SafetensorError("the index says that it is here, and it is not", path, name=name)
    return found


def _files_of(source: Source) -> tuple[list[str], dict[str, str] | None]:
    """Return the files, and where there is an index which of them has which tensor."""
    if isinstance(source, (list, tuple)):
        paths = [kept_path(path) for path in source]
        if not paths:
            raise ValueError("files: there are none")
        if len(paths) != len(set(paths)):
            raise ValueError("files: one is given twice")
        return paths, None
    path = kept_path(source)  # type: ignore[arg-type]
    if path.endswith(".json"):
        return _indexed(path)
    folder = pathlib.Path(path)
    if not folder.is_dir():
        return [path], None
    names = sorted(each.name for each in folder.iterdir())
    indexes = [name for name in names if name.endswith(index.SUFFIX)]
    if len(indexes) > 1:
        raise SafetensorError(
            f"it has several indexes, {', '.join(indexes)}: give one of them", path
        )
    if indexes:
        return _indexed(str(folder / indexes[0]))
    files = [str(folder / name) for name in names if name.endswith(".safetensors")]
    if not files:
        raise SafetensorError("there is neither an index nor any .safetensors file", path)
    return files, None


def _indexed(path: str) -> tuple[list[str], dict[str, str]]:
    folder = pathlib.Path(path).parent
    owners = {name: str(folder / file_name) for name, file_name in index.read(path)[0].items()}
    if not owners:
        raise SafetensorError("the index names no tensor", path)
    return sorted(set(owners.values())), owners
