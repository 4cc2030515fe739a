"""The hooks: which parts of DeepSpeed install() replaces, each with the way back.

DeepSpeed resolves its builder classes once, at import, by its accelerator. Methods are replaced on those classes, so
that modules which imported them earlier are reached. Where an accelerator has no such op, all its names share one
class that refuses to load; there each name gets a subclass of its own, in every module that has the name.
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

# Names of the classes, and of the ops in DeepSpeed's tables. The oldest DeepSpeed served has no PinMemoryBuilder.
_OPS = {
    "AsyncIOBuilder": "async_io",
    "GDSBuilder": "gds",
    "PinMemoryBuilder": "pin_memory",
    "UtilsBuilder": "utils",
}

_MISSING = object()


def import_deepspeed() -> None:
    """Import all of DeepSpeed that :func:`replace` looks at."""
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
    """Replace the builders' methods and DeepSpeed's tables of ops; the stack puts back what was there."""
    import deepspeed.ops.op_builder

    _warn_of_loaded_ops(deepspeed.ops.op_builder.builder.OpBuilder)
    for builder, op in _OPS.items():
        for found in _classes(builder):
            served = found if op == found.NAME else _own_class(stack, builder, found)
            _replace_methods(stack, served, op)
    _replace_tables(stack)


def _classes(builder: str) -> list[Any]:
    """Return the distinct classes that go by a builder's name in DeepSpeed's packages of builders."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(_PACKAGE)[0] == ""]
    found = [getattr(module, builder, None) for module in modules]
    return list(dict.fromkeys(kind for kind in found if isinstance(kind, type)))


def _own_class(stack: ExitStack, builder: str, shared: Any) -> Any:
    """Give a builder's name a class of its own, a subclass of the one that it shares with others."""
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
        own_load = builder.load

        def load_utils(self: Any, verbose: bool = False) -> Any:
            return _Utils(lambda: own_load(self, verbose))

        set_attribute(stack, builder, "load", load_utils)
        return

    def load(_: Any, verbose: bool = False) -> Any:
        if verbose:
            print(f"tensorferry {tensorferry.__version__} serves {op}; nothing is compiled")
        return ops

    def is_compatible(self: Any, verbose: bool = False) -> bool:
        reason = _refusal(op)
        if verbose and reason is not None:
            self.warning(f"{op}: {reason}")
        return reason is None

    set_attribute(stack, builder, "load", load)
    set_attribute(stack, builder, "is_compatible", is_compatible)


class _Utils(types.ModuleType):
    """`utils` with our cast_to_byte_tensor; any other function is DeepSpeed's, compiled when it is first asked for."""

    def __init__(self, load: Callable[[], Any]) -> None:
        super().__init__("utils", "DeepSpeed's utils op, served by tensorferry where it can be.")
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
            raise AttributeError(f"{name}: DeepSpeed's utils op does not load: {error}") from error


def _refusal(op: str) -> str | None:
    if op == "gds":
        return ops.gds_refusal()
    if op == "async_io":
        refusals = tensorferry.engines()
        if all(refusals.values()):
            return "; ".join(f"{engine}: {why}" for engine, why in refusals.items())
    return None


def _replace_tables(stack: ExitStack) -> None:
    """Let DeepSpeed's report and its users' checks see what is served."""
    import deepspeed.git_version_info
    import deepspeed.ops

    # From 0.19 on the table of compatible ops is made when it is first looked at: it must not outlive us.
    name = "__compatible_ops__"
    table = vars(deepspeed.ops).get(name)
    if table is None:
        stack.callback(vars(deepspeed.ops).pop, name, None)
    # Not gds: asking for it initialises CUDA, after which this process could not fork for work on GPUs. Its builder
    # is asked when the time has come.
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
            f"DeepSpeed's own {', '.join(loaded)} is loaded already: what was made with it stays with it, and neither "
            "engine knows the other's locked tensors (remedy: tensorferry.deepspeed.install() right after "
            "import deepspeed)",
            RuntimeWarning,
            stacklevel=4,
        )


def set_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give an attribute another value; the stack puts back what was there."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)


def _set_item(stack: ExitStack, table: dict[str, Any], key: str, value: Any) -> None:
    stack.callback(table.__setitem__, key, table[key])
    table[key] = value
