"""``optimizer.state`` of an offloaded optimizer: which parameters have state, and which entries it has.

Values are read and written by calls, ``read_state(param)`` and ``write_state(param, state)``: a change of a tensor
after it was read could not be noticed. Libraries that pass over ``optimizer.state`` and put each entry back, such as
Lightning when it moves state to a device, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

_REMEDY = (
    "the state of an offloaded optimizer is read with optimizer.read_state(param), which returns a copy, and changed "
    "with optimizer.write_state(param, state)"
)


class StoredState:
    """The entry of a parameter in ``optimizer.state``: the names of its values, which cannot be read here.

    It is not a mapping: code that copies mappings would ask for the values.
    """

    def __init__(self, names: list[Any]) -> None:
        self._names = names

    def __getitem__(self, name: Any, _: Any = None) -> NoReturn:
        """Raise: values are read with ``read_state``."""
        raise TypeError(f"state[param][{name!r}]: {_REMEDY}")

    __setitem__ = __delitem__ = __getitem__

    def __iter__(self) -> Iterator[Any]:
        """Yield the names of the values."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._names)

    def __repr__(self) -> str:
        """Show the names."""
        return f"<stored state with {self._names}>"


class StateView(MutableMapping[Any, Any]):
    """The parameters that have state, with their entries."""

    def __init__(self, names: dict[torch.Tensor, list[Any]]) -> None:
        self._entries = {param: StoredState(each) for param, each in names.items()}

    def __getitem__(self, param: Any) -> StoredState:
        """Return the entry of a parameter, which is empty if it has no state."""
        return self._entries.get(param) or StoredState([])

    def __setitem__(self, param: Any, state: Any) -> None:
        """Accept an entry of this view, unchanged, and raise for everything else."""
        if not isinstance(state, StoredState) or param not in self._entries:
            raise TypeError(f"state[param] = ...: {_REMEDY}")

    def __delitem__(self, param: Any) -> None:
        """Raise: state is deleted with ``write_state``."""
        raise TypeError(f"del state[param]: {_REMEDY}; write_state(param, {{}}) deletes it")

    def __contains__(self, param: object) -> bool:
        """Return whether a parameter has state."""
        return param in self._entries

    def __iter__(self) -> Iterator[Any]:
        """Yield the parameters that have state."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of parameters that have state."""
        return len(self._entries)

    def __repr__(self) -> str:
        """Show the number of parameters."""
        return f"<state of {len(self)} parameters, on drives>"
