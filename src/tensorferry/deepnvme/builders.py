"""The hooks of :func:`tensorferry.deepspeed.install`: the parts of DeepSpeed that it replaces.

Each hook leaves a callback that restores the original. An op is a compiled extension of DeepSpeed, such as async_io;
its builder is the class that compiles and loads it. DeepSpeed selects its builder classes once, at import, for its
accelerator (CUDA, CPU, ...). The hooks replace methods of those classes, which also takes effect in modules that
imported the classes earlier. For an op that the accelerator does not have, the builder's name refers to one class that
refuses to load, and all such names share it. Each of these names then gets its own subclass, in every module that has
the name, because a replaced method of the shared class would change the other ops, too.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.deepnvme import ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

_PACKAGE = "deepspeed.ops.op_builder"

# The builder classes, and the ops' names in DeepSpeed's tables. The oldest supported DeepSpeed has no PinMemoryBuilder.
_OPS = {
    "AsyncIOBuilder": "async_io",
    "GDSBuilder": "gds",
    "PinMemoryBuilder": "pin_memory",
    "UtilsBuilder": "utils",
}

_MISSING = object()


def import_deepspeed() -> None:
    """Import the parts of DeepSpeed that :func:`replace` changes."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ModuleNotFoundError(
            "DeepSpeed is not installed (remedy: pip install deepspeed)", name="deepspeed"
        ) from None
    import deepspeed.ops.op_builder  # noqa: F401


def replace(stack: ExitStack) -> None:
    """Replace the builders' methods and DeepSpeed's tables of ops; closing the stack restores the originals."""
    import deepspeed.ops.op_builder

    _warn_of_loaded_ops(deepspeed.ops.op_builder.builder.OpBuilder)
    for builder, op in _OPS.items():
        for found in _classes(builder):
            target = found if op == found.NAME else _separate_class(stack, builder, found)
            _replace_methods(stack, target, op)
    _replace_tables(stack)


def _classes(builder: str) -> list[Any]:
    """Return the distinct classes with a builder's name in DeepSpeed's packages of builders."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(_PACKAGE)[0] == ""]
    found = [getattr(module, builder, None) for module in modules]
    return list(dict.fromkeys(kind for kind in found if isinstance(kind, type)))


def _separate_class(stack: ExitStack, builder: str, shared: Any) -> Any:
    """Replace the class that a builder's name shares with other names by a separate subclass, and return it."""
    own = type(builder, (shared,), {"__module__": shared.__module__, "__doc__": shared.__doc__})

    def rename(before: Any, after: Any) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(builder) is before:
                setattr(module, builder, after)

    rename(shared, own)
    stack.callback(rename, own, shared)
    return own


def _replace_methods(stack: ExitStack, builder: Any, op: str) -> None:
    if op == "utils":
        original_load = builder.load

        def load_utils(self: Any, verbose: bool = False) -> Any:
            return _Utils(lambda: original_load(self, verbose))

        set_attribute(stack, builder, "load", load_utils)
        return

    def load(_: Any, verbose: bool = False) -> Any:
        if verbose:
            print(f"tensorferry {tensorferry.__version__} provides {op}; nothing is compiled")
        return ops

    def is_compatible(self: Any, verbose: bool = False) -> bool:
        reason = _refusal(op)
        if verbose and reason is not None:
            self.warning(f"{op}: {reason}")
        return reason is None

    set_attribute(stack, builder, "load", load)
    set_attribute(stack, builder, "is_compatible", is_compatible)


class _Utils(types.ModuleType):
    """The op `utils` with our cast_to_byte_tensor. All other functions are DeepSpeed's, compiled on first use."""

    def __init__(self, load: Callable[[], Any]) -> None:
        super().__init__("utils", "DeepSpeed's utils op; tensorferry provides a part of it.")
        self.cast_to_byte_tensor = ops.cast_to_byte_tensor
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self._load(), name)
        except AttributeError:
            raise
        except Exception as error:
            raise AttributeError(f"{name}: cannot load DeepSpeed's utils op: {error}") from error


def _refusal(op: str) -> str | None:
    if op == "gds":
        return ops.gds_refusal()
    if op == "async_io":
        refusals = tensorferry.engines()
        if all(refusals.values()):
            return "; ".join(f"{engine}: {why}" for engine, why in refusals.items())
    return None


def _replace_tables(stack: ExitStack) -> None:
    """Mark the ops as compatible and installed in DeepSpeed's tables, which its report and users' checks read."""
    import deepspeed.git_version_info
    import deepspeed.ops

    # Since 0.19 DeepSpeed builds the table of compatible ops on first access. If that happens while we are installed,
    # the table contains our answers, so uninstall() must remove it.
    name = "__compatible_ops__"
    table = vars(deepspeed.ops).get(name)
    if table is None:
        stack.callback(vars(deepspeed.ops).pop, name, None)
    # The entry of gds is not changed: its check would initialize CUDA, and after that the process's forked children
    # could not use CUDA. GDSBuilder makes the check when it is used.
    for op in ("async_io", "pin_memory"):
        if table is not None and op in table:
            _set_item(stack, table, op, _refusal(op) is None)
        installed = deepspeed.git_version_info.installed_ops
        if op in installed and _refusal(op) is None:
            _set_item(stack, installed, op, True)


def _warn_of_loaded_ops(base: Any) -> None:
    loaded = sorted({"async_io", "gds", "pin_memory"} & set(base._loaded_ops))
    if loaded:
        warnings.warn(
            f"DeepSpeed's own {', '.join(loaded)} is loaded already: existing handles keep using it, and the two "
            "engines do not recognize each other's locked tensors (remedy: call tensorferry.deepspeed.install() "
            "directly after import deepspeed)",
            RuntimeWarning,
            stacklevel=4,
        )


def set_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute; closing the stack restores the original."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)


def _set_item(stack: ExitStack, table: dict[str, Any], key: str, value: Any) -> None:
    stack.callback(table.__setitem__, key, table[key])
    table[key] = value
