"""Detection of subclasses that override parts of torch's writers and readers that our classes do not use: hooks.

torch's classes call their own methods (`_write_data`, `_slice_file`, `_process_read_request`) and use their own objects
(`fs`, `transforms`). Our classes derive from torch's but do not use these methods and objects, so they would silently
ignore an override, and load or save wrong values. When there is an override, torch's code does the work.

There is no list of these methods: every attribute of torch's class counts as a hook unless our class defines it or it
is in CALLED. So a method that a later torch adds counts immediately.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.checkpoint import filesystem

from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import absolute_path, checked_path
from tensorferry.transfer.remote import ObjectPath, as_path, source_path

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from tensorferry.base.checks import Readable

_Path: TypeAlias = "str | os.PathLike[str]"

CALLED = frozenset(
    {
        # Called by torch's save() and load(), in our classes too.
        *("set_up_storage_writer", "set_up_storage_reader", "reset", "storage_meta", "close"),
        *("prepare_local_plan", "prepare_global_plan", "validate_checkpoint_id"),
        *("stage", "synchronize_staging", "should_synchronize_after_execute"),
        "_synchronize_after_execute",
        # Used by callers, and not by torch's methods that ours replace.
        *("checkpoint_id", "metadata_path"),
    }
)
"""Attributes that torch's functions or callers use directly, so an override of them always has an effect."""

_OF_PYTHON = frozenset({"_abc_impl", "_is_protocol", "_is_runtime_protocol"})


def names_of(torchs: type) -> set[str]:
    """Return the names of all attributes of a torch class, except those that every class has."""
    kinds = [kind for kind in torchs.__mro__ if kind.__module__.partition(".")[0] == "torch"]
    names = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    return names - _OF_PYTHON


def hooks_of(ours: type, torchs: type, also_called: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the attributes that only torch's code uses (hooks), with torch's values.

    ``also_called`` has the names of attributes that our class uses as torch's does, so they are not hooks.
    """
    names = names_of(torchs) - CALLED - also_called - vars(ours).keys()
    return {name: inspect.getattr_static(torchs, name) for name in names}


def overridden(instance: Any, hooks: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the hooks that differ from torch's, in the class or in the object itself."""
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
    """Return whether a subclass has set its own file system, which then interprets paths."""
    fs = instance.fs
    return type(fs) is not filesystem.FileSystem or bool(vars(fs))


def first_folder(instance: Any, ours: type, path: Readable, *, reads: bool = False) -> Any:
    """Return the absolute path of the folder that our constructor got; a reader's (``reads``) may be in a bucket.

    A subclass may pass a URL, and set a file system that supports it after our constructor. If it does not set one,
    :func:`check_folder` refuses the URL.
    """
    try:
        return _folder(path, "path", reads)
    except ValueError:
        if type(instance) is ours:
            raise
        instance._url = path
        return path


def folder(instance: Any, path: Readable, *, reads: bool = False) -> Any:
    """Return the absolute path of a folder for reset(); ``path`` is unchanged if a subclass has its own file system."""
    if has_own_files(instance):
        return path
    kept = _folder(path, "checkpoint_id", reads)
    vars(instance).pop("_url", None)
    return kept


def set_object_path(instance: Any, folder: Any) -> None:
    """Set a reader's path again if it is in a bucket, because torch's constructor has made a local path of it."""
    if isinstance(folder, ObjectPath):
        instance.path = folder


def _folder(path: Readable, name: str, reads: bool) -> Any:
    if reads:
        return as_path(source_path(path, name))
    return Path(absolute_path(path, name))  # type: ignore[arg-type]  # raises for other types


def check_folder(instance: Any) -> None:
    """Refuse a URL if no subclass has set a file system that supports it."""
    url = vars(instance).get("_url")
    if url is not None and not has_own_files(instance):
        checked_path(url)


def warn_torch_code(instance: Any, names: frozenset[str], consequence: str) -> None:
    """Warn that torch's code does the work, and of the consequence of this."""
    warn(
        f"{type(instance).__name__} changes {', '.join(sorted(names))}, which only torch's own code uses: {consequence}"
    )


def _is_torchs(transforms: Any) -> bool:
    """Return whether the object that holds torch's extensions is torch's own."""
    if transforms is None:  # before torch 2.7
        return True
    known = {"extensions", "extension_registry"}
    registry: Any = getattr(transforms, "extension_registry", None)
    return (
        type(transforms).__module__ == filesystem.__name__
        and vars(transforms).keys() <= known
        and (registry is None or type(registry).__module__.partition(".")[0] == "torch")
    )
