"""Subclasses of our writers and readers: which parts of torch's classes they may change.

Our classes derive from torch's, so that programs take them for torch's, but do the work by other methods. A subclass
may override what torch's functions call, and what our classes define. Another attribute of torch's class, such as a
method that only torch's own code calls, would be ignored silently: a subclass that changes it is refused when it is
made.
"""

from __future__ import annotations

from typing import Any

# What torch's save(), async_save(), load() and their callers use.
_CALLED = frozenset(
    {
        *("set_up_storage_writer", "set_up_storage_reader", "reset", "storage_meta", "close"),
        *("prepare_local_plan", "prepare_global_plan", "validate_checkpoint_id", "checkpoint_id"),
        *("stage", "synchronize_staging", "should_synchronize_after_execute", "metadata_path"),
        "_synchronize_after_execute",
    }
)
_OF_PYTHON = frozenset({"_abc_impl", "_is_protocol", "_is_runtime_protocol"})


class _TorchsOwn:
    """An attribute of an instance that only torch's code uses: its value stays as torch's constructor has set it."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, _: type) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self._name]
        except KeyError:  # older versions of torch do not have the attribute
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        first = vars(instance).setdefault(self._name, value)
        if type(value) is not type(first) or vars(value) != vars(first):
            raise TypeError(_refusal(type(instance), self._name))


class InPlaceOfTorchs:
    """A base class of our classes that torch's save() and load() get in place of torch's."""

    fs = _TorchsOwn()
    transforms = _TorchsOwn()
    serialization_format = _TorchsOwn()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        torchs, ours = set(), {*_CALLED, *_OF_PYTHON}
        for base in cls.__mro__:
            package = base.__module__.partition(".")[0]
            if package == "torch":
                torchs |= {name for name in vars(base) if not name.startswith("__")}
            elif package == "tensorferry":
                ours |= vars(base).keys()
        changed = [name for name in sorted(torchs - ours) if _package_of(cls, name) != "torch"]
        if changed:
            raise TypeError(_refusal(cls, ", ".join(changed)))


def _package_of(kind: type, name: str) -> str:
    """Return the package of the class from which a class has an attribute."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner.__module__.partition(".")[0]


def _refusal(kind: type, names: str) -> str:
    torchs = next(base for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch")
    return (
        f"{kind.__name__} changes {names}, which only torch's own class uses (remedy: subclass "
        f"{torchs.__module__}.{torchs.__name__})"
    )
