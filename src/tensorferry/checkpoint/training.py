"""The parts of a training, as a checkpoint stores them: models, optimizers, objects with a state, values of each rank.

A model is stored by the names that torch gives its parameters without wrappers, and an optimizer by the names of its
parameters. What a restored optimizer gets follows from the checkpoint and not from its own state, which is empty before
its first step: parameters without state stay without it. torch's get_state_dict() makes a step to create the state of
all parameters, so a parameter that had none when it was saved cannot be restored.

Other objects are stored as one object each, because torch would make text of the numbers among the keys of a dict and
drop empty dicts. Only one with large or distributed tensors is taken apart, as dicts are.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tensorferry.base.reprs import first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch.distributed.checkpoint.metadata import Metadata

_MAX_WHOLE_NBYTES = 1 << 20  # the tensors of an object that is stored as one object
_SHOWN_NAMES = 20


class Restored(NamedTuple):
    """The result of ``Checkpoints.restore(state, strict=False)``.

    Attributes
    ----------
    step : int or None
        The loaded step, or None if the folder and the mirror have no checkpoint.
    missing : tuple of str
        Names in the state that the checkpoint does not have; they keep their values.
    unexpected : tuple of str
        Names in the checkpoint that the parts of the state do not have; they were not loaded.
    changed : tuple of str
        Names with another size or kind, which keep their values, and with another dtype, whose values were converted.
        Each is followed by what differs.
    """

    step: int | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


class RandomState:
    """The state of the global random number generators of Python, NumPy, torch and CUDA, as a part of a training.

    ``Checkpoints`` keeps it for each rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators that the process uses."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy as np

            state["numpy"] = np.random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of the generators."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])
        for device, each in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, device)


class Parts:
    """The parts of a state on one rank.

    Parameters
    ----------
    state : dict
        The state that a caller of ``Checkpoints`` passes.
    per_rank : collection of str
        Keys of values that each rank keeps; random states and generators are always kept so.
    rank, size : int
        This rank, and the number of ranks.
    """

    def __init__(
        self, state: dict[str, Any], per_rank: Collection[str], rank: int, size: int
    ) -> None:
        self._state, self._size = state, size
        self._own_names = {
            key: f"{key}.rank_{rank}"
            for key, value in state.items()
            if key in per_rank or isinstance(value, (RandomState, torch.Generator))
        }
        self._models = {
            key: value for key, value in sorted(state.items()) if isinstance(value, torch.nn.Module)
        }
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.changed: list[str] = []
        self.loaded: dict[str, Any] = {}  # by flat name: what a load fills
        self._current: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
        self._optimizers: dict[str, _NamedOptimizer] = {}

    def stored(self) -> dict[str, Any]:
        """Return what a checkpoint stores; objects are asked in the same order on all ranks."""
        plain: dict[str, Any] = {}
        for key, value in sorted(self._state.items()):
            if key in self._own_names:
                plain[self._own_names[key]] = (_values(value),)
            else:
                values = self._values(value)
                plain[key] = (values,) if _is_object(value) and _is_small(values) else values
        return plain

    def _values(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return get_model_state_dict(value)
        if isinstance(value, torch.optim.Optimizer):
            return _NamedOptimizer(value, self._models).state_dict()
        return _values(value)

    def compare(self, metadata: Metadata, read: Callable[[dict[str, Any]], None]) -> None:
        """Compare the state with a checkpoint, and set what is to be loaded; ``read`` reads objects by their names."""
        paths = getattr(metadata, "planner_data", None)
        paths = paths if isinstance(paths, dict) else {}
        by_key: dict[str, dict[str, tuple[Any, ...]]] = defaultdict(dict)
        for name in metadata.state_dict_metadata:
            path = paths.get(name, (name,))
            by_key[str(path[0])][name] = path
        for key, value in sorted(self._state.items()):
            if key in self._own_names:
                self._compare_rank_values(key, by_key)
            elif isinstance(value, torch.optim.Optimizer):
                self._compare_optimizer(key, by_key[key], metadata, read)
            elif _is_object(value) and key in by_key[key]:
                self.loaded[key] = None
            else:
                self._compare_values(key, self._values(value), by_key[key], metadata)

    def check(self) -> None:
        """Raise a ValueError that names all differences, if there are any."""
        texts = [
            f"{what}: {first_of(names, _SHOWN_NAMES)}"
            for what, names in (
                ("missing in the checkpoint", self.missing),
                ("not in the state", self.unexpected),
                ("different", self.changed),
            )
            if names
        ]
        if texts:
            raise ValueError(
                f"the state and the checkpoint differ, and nothing has been loaded ({'; '.join(texts)}). Remedy: "
                "restore(..., strict=False) loads the rest, and returns these names"
            )

    def _compare_rank_values(self, key: str, by_key: dict[str, Any]) -> None:
        own, prefix = self._own_names[key], f"{key}.rank_"
        if own in by_key:
            self.loaded[own] = None
        else:
            self.missing.append(own)
        others = [
            name
            for name in by_key
            if name.startswith(prefix) and int(name.removeprefix(prefix)) >= self._size
        ]
        self.unexpected += others

    def _compare_values(
        self, key: str, values: Any, stored: dict[str, Any], metadata: Metadata
    ) -> None:
        flat, paths = flatten_state_dict({key: values})
        self._current[key] = values, flat, paths
        self.unexpected += [name for name in stored if name not in flat]
        for name, value in flat.items():
            if name not in metadata.state_dict_metadata:
                self.missing.append(name)
                continue
            entry = metadata.state_dict_metadata[name]
            if isinstance(entry, TensorStorageMetadata):
                if not isinstance(value, torch.Tensor):
                    self.changed.append(f"{name} (a tensor in the checkpoint)")
                    continue
                if entry.size != value.size():
                    self.changed.append(
                        f"{name} (size {list(entry.size)} in the checkpoint, {list(value.size())} in the state)"
                    )
                    continue
                if entry.properties.dtype != value.dtype:
                    self.changed.append(
                        f"{name} ({entry.properties.dtype} in the checkpoint, {value.dtype} in the state)"
                    )
            self.loaded[name] = value

    def _compare_optimizer(
        self,
        key: str,
        stored: dict[str, Any],
        metadata: Metadata,
        read: Callable[[dict[str, Any]], None],
    ) -> None:
        if not stored:
            self.missing.append(key)
            return
        named = self._optimizers[key] = _NamedOptimizer(self._state[key], self._models)
        entries = {name: metadata.state_dict_metadata[name] for name in stored}
        tensors = {
            name: named.room_for(stored[name], entry)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        objects: dict[str, Any] = dict.fromkeys(stored.keys() - tensors.keys())
        read(objects)
        self.loaded |= tensors
        missing, unexpected = named.compare(stored, objects | tensors)
        self.missing += [f"{key}.{name}" for name in missing]
        self.unexpected += [f"{key}.{name}" for name in unexpected]

    def set_loaded(self) -> None:
        """Give the loaded values to the parts: models first, random states last."""

        def order(item: tuple[str, Any]) -> tuple[int, str]:
            kinds = (torch.nn.Module, torch.optim.Optimizer, RandomState)
            place = next((k for k, kind in enumerate(kinds) if isinstance(item[1], kind)), 1.5)
            return int(2 * place), item[0]

        for key, value in sorted(self._state.items(), key=order):
            whole = self._own_names.get(key, key)
            if key in self._current:
                self._set_values(key, value)
            elif isinstance(value, torch.optim.Optimizer) and key in self._optimizers:
                self._optimizers[key].load()
            elif whole in self.loaded:
                self._give(key, *self.loaded[whole])

    def _set_values(self, key: str, value: Any) -> None:
        values, flat, paths = self._current[key]
        holder = {key: values}
        for name, path in paths.items():
            if name not in self.loaded:
                if isinstance(value, torch.nn.Module):
                    values.pop(path[1], None)
            elif self.loaded[name] is not flat[name]:  # tensors have been loaded in place
                set_element(holder, path, self.loaded[name])
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, values, options=StateDictOptions(strict=False))
        else:
            self._give(key, holder[key])

    def _give(self, key: str, content: Any) -> None:
        """Undo :func:`_values`."""
        value = self._state[key]
        if isinstance(value, torch.Generator):
            value.set_state(content)
        elif isinstance(value, Stateful):
            value.load_state_dict(content)
        else:
            self._state[key] = content


class _NamedOptimizer:
    """An optimizer whose parameters have the names that they have in the models; others have their positions."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, models: dict[str, torch.nn.Module]
    ) -> None:
        self._optimizer = optimizer
        self._params: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}  # by the id of the parameter
        for key, model in models.items():
            for wrapped, parameter in model.named_parameters():
                name = ".".join(sorted(_get_fqns(model, wrapped))[:1])
                name = f"{key}.{name}" if len(models) > 1 else name
                self._params[name] = parameter
                self._names.setdefault(id(parameter), name)
        for position, param in enumerate(self._all_params()):
            self._params.setdefault(self._names.setdefault(id(param), str(position)), param)
        self._stored: dict[str, Any] = {}  # the state to load, in the form of state_dict()
        self._added: set[int] = set()  # the positions of groups that are new

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with names in place of numbers."""
        state = self._optimizer.state_dict()
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [self._names[id(param)] for param in self._all_params()]
        name_of = dict(zip(numbers, names, strict=True))
        groups = []
        for group, live in zip(state["param_groups"], self._optimizer.param_groups, strict=True):
            named = [name_of[number] for number in group["params"]]
            learns = [param.requires_grad for param in live["params"]]
            groups.append({**group, "params": named, "requires_grad": learns})
        states = {name_of.get(number, number): each for number, each in state["state"].items()}
        return {**state, "state": states, "param_groups": groups}

    def compare(
        self, paths: dict[str, tuple[Any, ...]], values: dict[str, Any]
    ) -> tuple[list[str], list[str]]:
        """Set the state to load, by flat names; its tensors may be filled later.

        Return the names without a stored group, and those without a parameter.
        """
        tree: dict[str, Any] = {"": {"state": {}, "param_groups": []}}
        for name, path in paths.items():
            set_element(tree, ("", *path[1:]), values[name])
        self._stored = tree[""]
        groups = self._stored["param_groups"]
        own = [self._names[id(param)] for param in self._all_params()]
        for group in groups:  # older checkpoints have numbers, in the order of the parameters
            group["params"] = [
                own[each] if isinstance(each, int) and each < len(own) else str(each)
                for each in group["params"]
            ]
        for number in range(len(self._optimizer.param_groups), len(groups)):
            group = groups[number]
            if not set(own) & set(group["params"]) and self._params.keys() >= set(group["params"]):
                self._added.add(number)
                own += group["params"]
        stored = [name for group in groups for name in group["params"]]
        return sorted(set(own) - set(stored)), sorted(set(stored) - set(own))

    def room_for(self, path: tuple[Any, ...], entry: TensorStorageMetadata) -> torch.Tensor:
        """Return a tensor to load an entry into, which is distributed as its parameter is."""
        param = self._params.get(path[2]) if path[1] == "state" else None
        current = self._optimizer.state.get(param) if param is not None else None
        for like in ((current or {}).get(path[-1]), param):
            if isinstance(like, DTensor) and like.size() == entry.size:
                return torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")

    def load(self) -> None:
        """Add new groups, and load the state."""
        state = self._stored
        # The options of the stored groups, by the names of their parameters.
        options: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(state["param_groups"]):
            learns, names = group.pop("requires_grad", None), group["params"]
            if number in self._added:
                params = [self._params[name] for name in names]
                for param, learning in zip(params, learns or (), strict=False):
                    param.requires_grad_(learning)
                first = state["param_groups"][0]
                own_options = {
                    name: value
                    for name, value in group.items()
                    if not (isinstance(value, torch.Tensor) and value.equal(first.get(name)))
                }
                self._optimizer.add_param_group({**own_options, "params": params})
            options |= dict.fromkeys(names, group)
        own = [self._names[id(param)] for param in self._all_params()]
        number_of = {name: number for number, name in enumerate(own)}
        groups = []
        for position, live in enumerate(self._optimizer.param_groups):
            names = [self._names[id(param)] for param in live["params"]]
            same = state["param_groups"][position : position + 1] or [{}]
            found = next((options[name] for name in names if name in options), same[0])
            numbers = [number_of[name] for name in names]
            groups.append({**live, **found, "params": numbers})
        renamed = {
            own[int(name)] if name not in number_of and name.isdecimal() else name: each
            for name, each in state["state"].items()
        }
        states = {number_of[name]: each for name, each in renamed.items() if name in number_of}
        # Groups may share a tensor, such as the learning rate, with each other and with the optimizer's defaults.
        tensors = [
            {name: value for name, value in group.items() if isinstance(value, torch.Tensor)}
            for group in self._optimizer.param_groups
        ]
        self._optimizer.load_state_dict({**state, "state": states, "param_groups": groups})
        for group, before in zip(self._optimizer.param_groups, tensors, strict=True):
            for name, tensor in before.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name] = tensor.copy_(group[name])
        if type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            self._keep_dtypes(states)

    def _keep_dtypes(self, states: dict[int, Any]) -> None:
        """Undo the conversion of torch's load_state_dict(), which gives the state the dtype of the parameter."""
        for number, param in enumerate(self._all_params()):
            for name, value in states.get(number, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor and self._optimizer.state[param][name].dtype != value.dtype:
                    self._optimizer.state[param][name] = value.to(param.device)


def _is_object(value: Any) -> bool:
    is_known = isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
    return isinstance(value, Stateful) and not is_known


def _values(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if isinstance(value, Stateful) else value


def _is_small(values: Any) -> bool:
    """Return whether values have only a few bytes of tensors, all of them plain and in host memory."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return all(type(each) is torch.Tensor and each.is_cpu for each in tensors) and (
        sum(each.nbytes for each in tensors) <= _MAX_WHOLE_NBYTES
    )
