"""What a subclass has changed of torch's writers and readers that only torch's own code asks for.

torch's classes call methods of their own (`_write_data`, `_slice_file`, `_process_read_request`) and use objects of
their own (`fs`, `transforms`). Our classes derive from them and do the work in another way, so a subclass that changes
one of these would be passed over in silence, and the numbers would be wrong. Where something is changed, torch's code
does the work.

Nothing here lists these methods: all that torch's class has is one, unless our class defines it or it is in CALLED. So
a method that a later torch adds counts at once.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.checkpoint import filesystem

from tensorferry.base.checks import checked_path, kept_path
from tensorferry.base.warned import warn
from tensorferry.transfer.remote import ObjectPath, place, source_path

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from tensorferry.base.checks import Readable

_Path: TypeAlias = "str | os.PathLike[str]"

CALLED = frozenset(
    {
        # By torch's save() and load(), whoever does the work in between.
        *("set_up_storage_writer", "set_up_storage_reader", "reset", "storage_meta", "close"),
        *("prepare_local_plan", "prepare_global_plan", "validate_checkpoint_id"),
        *("stage", "synchronize_staging", "should_synchronize_after_execute"),
        "_synchronize_after_execute",
        # By those that use them, and by nothing in torch's classes that ours replace.
        *("checkpoint_id", "metadata_path"),
    }
)
"""What is called from outside, so that a subclass's own has its effect in any case."""

_OF_PYTHON = frozenset({"_abc_impl", "_is_protocol", "_is_runtime_protocol"})


def names_of(torchs: type) -> set[str]:
    """Return all that a class of torch's has, without what every class has."""
    kinds = [kind for kind in torchs.__mro__ if kind.__module__.partition(".")[0] == "torch"]
    names = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    return names - _OF_PYTHON


def hooks_of(ours: type, torchs: type, also_called: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return what only torch's code asks for, and what torch has there."""
    names = names_of(torchs) - CALLED - also_called - vars(ours).keys()
    return {name: inspect.getattr_static(torchs, name) for name in names}


def changed(instance: Any, hooks: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the hooks that are other than torch's, in a class or in the object itself."""
    found = {
        name
        for name, original in hooks.items()
        if inspect.getattr_static(instance, name, original) is not original
    }
    if has_own_files(instance):
        found.add("fs")
    if not _is_torchs(getattr(instance, "transforms", None)):
        found.add("transforms")
    return frozenset(found)


def has_own_files(instance: Any) -> bool:
    """Return whether a subclass has set a file system of its own, which says what a path is."""
    fs = instance.fs
    return type(fs) is not filesystem.FileSystem or bool(vars(fs))


def first_folder(instance: Any, ours: type, path: Readable, *, reads: bool = False) -> Any:
    """Return the absolute path of the folder that our constructor is given; where it ``reads``, perhaps in a bucket.

    A subclass may give a URL, and set behind that constructor the file system that understands it; where it does not,
    :func:`check_folder` refuses it.
    """
    try:
        return _folder(path, "path", reads)
    except ValueError:
        if type(instance) is ours:
            raise
        instance._url = path
        return path


def folder(instance: Any, path: Readable, *, reads: bool = False) -> Any:
    """Return the absolute path of another folder, or what a subclass's own file system understands."""
    if has_own_files(instance):
        return path
    kept = _folder(path, "checkpoint_id", reads)
    vars(instance).pop("_url", None)
    return kept


def keep_place(instance: Any, folder: Any) -> None:
    """Set the place in a bucket that a reader is given; torch's code has made a local path of it."""
    if isinstance(folder, ObjectPath):
        instance.path = folder


def _folder(path: Readable, name: str, reads: bool) -> Any:
    if reads:
        return place(source_path(path, name))
    return Path(kept_path(path, name))  # type: ignore[arg-type]  # it says what is wrong


def check_folder(instance: Any) -> None:
    """Refuse a URL where no subclass has set a file system that understands it."""
    url = vars(instance).get("_url")
    if url is not None and not has_own_files(instance):
        checked_path(url)


def tell(instance: Any, names: frozenset[str], consequence: str) -> None:
    """Warn that torch's code does the work, where that is less safe."""
    warn(
        f"{type(instance).__name__} changes {', '.join(sorted(names))}, which only torch's own code uses: {consequence}"
    )


def _is_torchs(transforms: Any) -> bool:
    """Return whether the object by which torch's classes look for extensions is torch's own."""
    if transforms is None:  # before torch 2.7
        return True
    known = {"extensions", "extension_registry"}
    registry: Any = getattr(transforms, "extension_registry", None)
    return (
        type(transforms).__module__ == filesystem.__name__
        and vars(transforms).keys() <= known
        and (registry is None or type(registry).__module__.partition(".")[0] == "torch")
    )
