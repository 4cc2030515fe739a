"""The state of an offloaded optimizer as a mapping that users read and write as if it were in memory.

``optimizer.state[param]`` is read from the drive and *handed out* to the user, as a dict of ordinary tensors. The user
may change the dict and the tensors. Before the next step, what has changed is written back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from tensorferry import _core
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.offload.optimizer import OffloadedOptimizer

# The states that users have received stay in memory. If they have more than this many bytes, settle() is called before
# another state is handed out: it writes the changed ones back and drops the references to all of them.
_GIVEN_NBYTES = 32 << 20


class _State(dict[Any, Any]):
    """A parameter's state; a dict that counts changes of its entries."""

    __slots__ = ("__weakref__", "writes")

    def __init__(self, state: dict[Any, Any]) -> None:
        super().__init__(state)
        self.writes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _counting(name: str) -> Any:
    method = getattr(dict, name)

    def counting(state: _State, *arguments: Any, **more: Any) -> Any:
        state.writes += 1
        return method(state, *arguments, **more)

    return functools.wraps(method)(counting)


for _name in (
    "__setitem__",
    "__delitem__",
    "__ior__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
):
    setattr(_State, _name, _counting(_name))


class HandedOutStates:
    """States that users have received since the last step.

    Before the next step, each state is compared with its original contents, and written back if it differs. From then
    on it is a state of an earlier step: nothing that a user writes to it, or to one of its tensors, reaches the
    optimizer. Such a write would be lost silently, so the next step raises.
    """

    def __init__(self, put_back: Callable[[torch.Tensor, dict[Any, Any] | None], None]) -> None:
        self._put_back: Any = weakref.WeakMethod(put_back)
        self._states: dict[torch.Tensor, tuple[_State, Any]] = {}
        self._earlier: list[tuple[weakref.ref[Any], Any]] = []
        self._nbytes = 0

    def state_of(
        self, param: torch.Tensor, read: Callable[[torch.Tensor], dict[Any, Any]]
    ) -> dict[Any, Any]:
        """Return a parameter's state, which is the same object until :meth:`settle` is called."""
        if param not in self._states:
            if self._nbytes > _GIVEN_NBYTES:
                self.settle()
            state = _State(read(param))
            self._states[param] = state, _fingerprint(state)
            self._nbytes += sum(leaf.nbytes for leaf in _tensors(state))
        return self._states[param][0]

    def settle(self) -> None:
        """Write changed states back. From now on all states that were handed out count as those of an earlier step.

        Raises
        ------
        RuntimeError
            A state of an earlier step has been changed.
        """
        self._earlier = [each for each in self._earlier if each[0]() is not None]
        for reference, before in self._earlier:
            alive = reference()
            if alive is not None and _fingerprint(alive, writes=True) != before:
                self._earlier = []
                raise RuntimeError(
                    "state: a state that was read before an earlier step, or a tensor of it, has been written to "
                    "since, which has no effect; read state[param] again after each step"
                )
            del alive
        while self._states:
            param, (state, before) = next(iter(self._states.items()))
            if _fingerprint(state) != before:
                self._put_back()(param, dict(state))
            del self._states[param]
            self._watch(state)
            for leaf in _tensors(state):
                self._watch(leaf)
            del state
        self._nbytes = 0

    def _watch(self, given: _State | torch.Tensor) -> None:
        self._earlier.append((weakref.ref(given), _fingerprint(given, writes=True)))

    def forget(self) -> None:
        """Forget all states that were handed out, because other states replace them."""
        self._states, self._earlier, self._nbytes = {}, [], 0

    def put(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        """Replace a parameter's state; None deletes it."""
        self._states.pop(param, None)
        self._put_back()(param, state)


def _tensors(state: _State) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor)]


def _fingerprint(given: _State | torch.Tensor, *, writes: bool = False) -> Any:
    """Return a value that changes with the contents; with ``writes``, also after a write of the same contents."""
    leaves, spec = _pytree.tree_flatten(dict(given) if isinstance(given, _State) else given)
    written = given.writes if writes and isinstance(given, _State) else 0
    return (
        written,
        spec,
        [
            (leaf.dtype, leaf.shape, _core.crc32(_bytes_of(leaf)), leaf._version if writes else 0)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        ],
    )


def _bytes_of(leaf: torch.Tensor) -> Any:
    to_local = getattr(leaf, "to_local", None)
    local = leaf if to_local is None else to_local()
    return tensor_bytes(local.detach().cpu().contiguous()).numpy()


class StateView(MutableMapping[torch.Tensor, Any]):
    """The state of all parameters, by parameter. An entry is read from the drive on access.

    Changes of an entry are written back before the next step.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> Any:
        optimizer = self._optimizer
        if param in optimizer._extra_entries:
            return optimizer._extra_entries[param]
        return optimizer._state_of_one(param)

    def __setitem__(self, param: torch.Tensor, state: Any) -> None:
        optimizer = self._optimizer
        with optimizer._locked():
            optimizer._readable()
            self._check(param, state)
            if not isinstance(param, torch.Tensor):  # torch allows any key in a state
                optimizer._extra_entries[param] = state
                return
            optimizer._handed_out.put(param, state)

    def _check(self, param: Any, state: Any) -> None:
        if not isinstance(param, torch.Tensor):
            return
        if param not in self._optimizer._shapes:
            raise KeyError(f"state: not a parameter of this optimizer: {type(param).__name__}")
        if not isinstance(state, dict):
            raise TypeError(f"state: {type(state).__name__} is not a dict")

    def __delitem__(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer
        with optimizer._locked():
            optimizer._readable()
            if param in optimizer._extra_entries:
                del optimizer._extra_entries[param]
                return
            if param not in self:
                raise KeyError(param)
            optimizer._handed_out.put(param, None)

    def __contains__(self, param: object) -> bool:
        if not isinstance(param, torch.Tensor):
            return param in self._optimizer._extra_entries
        return any(param is each for each in self)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([*self._optimizer._params_with_state(), *self._optimizer._extra_entries])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def items(self) -> Any:
        """Return all parameters with their states."""
        if self._optimizer._maps_state:
            return self._optimizer._mapped_state().items()
        return super().items()

    def replace(self, states: Any) -> None:
        """Replace the states of all parameters; those not in ``states`` lose theirs."""
        self._optimizer._readable()
        given = dict(states)
        for param, state in given.items():
            self._check(param, state)
        for param in list(self):
            if not given.get(param) or not isinstance(param, torch.Tensor):
                del self[param]
        for param, state in given.items():
            if state or not isinstance(param, torch.Tensor):
                self[param] = state

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters, on drives>"
