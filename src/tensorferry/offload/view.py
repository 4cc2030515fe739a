"""The state of an offloaded optimizer as its users have it: they read and write it as if it were in memory."""

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

# What has been given to users and may have been written to. More is looked at, and put back, at once.
_GIVEN_NBYTES = 32 << 20


class _State(dict[Any, Any]):
    """A parameter's state, which counts what is written into it."""

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


class Given:
    """States that users have been given since the last step.

    Each is compared with what it was before the next step begins, and put back where it differs. What is written later
    into a state of an earlier step, or into one of its tensors, would be lost silently: the next step then raises.
    """

    def __init__(self, put_back: Callable[[torch.Tensor, dict[Any, Any] | None], None]) -> None:
        self._put_back: Any = weakref.WeakMethod(put_back)
        self._states: dict[torch.Tensor, tuple[_State, Any]] = {}
        self._earlier: list[tuple[weakref.ref[Any], Any]] = []
        self._nbytes = 0

    def state_of(
        self, param: torch.Tensor, read: Callable[[torch.Tensor], dict[Any, Any]]
    ) -> dict[Any, Any]:
        """Return a parameter's state: the same object until the next step."""
        if param not in self._states:
            if self._nbytes > _GIVEN_NBYTES:
                self.settle()
            state = _State(read(param))
            self._states[param] = state, _fingerprint(state)
            self._nbytes += sum(leaf.nbytes for leaf in _tensors(state))
        return self._states[param][0]

    def settle(self) -> None:
        """Put back what has been written to; from now on it is of an earlier step.

        Raises
        ------
        RuntimeError
            A tensor of an earlier step has been written to.
        """
        self._earlier = [each for each in self._earlier if each[0]() is not None]
        for reference, before in self._earlier:
            alive = reference()
            if alive is not None and _fingerprint(alive, writes=True) != before:
                self._earlier = []
                raise RuntimeError(
                    "state: one that was taken from it before an earlier step, or a tensor of it, has been written to "
                    "since, which has no effect; take state[param] anew after each step"
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
        """Forget all states: others have been loaded."""
        self._states, self._earlier, self._nbytes = {}, [], 0

    def put(self, param: torch.Tensor, state: dict[Any, Any] | None) -> None:
        """Have a state in place of what a parameter has."""
        self._states.pop(param, None)
        self._put_back()(param, state)


def _tensors(state: _State) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor)]


def _fingerprint(given: _State | torch.Tensor, *, writes: bool = False) -> Any:
    """Return what a state or tensor has; with ``writes`` it tells also that the same has been written to it again."""
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
    """The state of parameters, by parameter. One parameter's is read when it is asked for.

    What is written into it before the next step counts.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> Any:
        optimizer = self._optimizer
        if param in optimizer._others:
            return optimizer._others[param]
        return optimizer._state_of_one(param)

    def __setitem__(self, param: torch.Tensor, state: Any) -> None:
        optimizer = self._optimizer
        with optimizer._locked():
            optimizer._readable()
            if not isinstance(param, torch.Tensor):  # as torch has it, anything may be there
                optimizer._others[param] = state
                return
            if param not in optimizer._shapes:
                raise KeyError(f"state: no parameter of the optimizer's: {type(param).__name__}")
            if not isinstance(state, dict):
                raise TypeError(f"state: {type(state).__name__} is not a dict")
            optimizer._given.put(param, state)

    def __delitem__(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer
        with optimizer._locked():
            optimizer._readable()
            if param in optimizer._others:
                del optimizer._others[param]
                return
            if param not in self:
                raise KeyError(param)
            optimizer._given.put(param, None)

    def __contains__(self, param: object) -> bool:
        return any(param is each for each in self)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([*self._optimizer._params_with_state(), *self._optimizer._others])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def items(self) -> Any:
        """Return all parameters with their states."""
        if self._optimizer._maps_state:
            return self._optimizer._mapped_state().items()
        return super().items()

    def replace(self, states: Any) -> None:
        """Have these states, and no others."""
        self._optimizer._readable()
        for param in list(self):
            if param in self._optimizer._others or param not in states:
                del self[param]
        for param, state in dict(states).items():
            if state:
                self[param] = state

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters, on drives>"
