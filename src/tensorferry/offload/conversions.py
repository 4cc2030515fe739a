"""Mapping of a transformers model to the tensors of its checkpoint, from transformers' own conversion rules.

A checkpoint may name and split its tensors differently from the model: transformers 5 saves the experts of Mixtral one
by one, and the model has them in one parameter. The rules of transformers consist of renamings and of converters.
Converters apply operations such as stack, concatenate and chunk to tensors. A *row* is the elements of a tensor along
its last dimension; in a tensor of one dimension, each element is a row. This module numbers the rows of the tensors in
the files, and gives the converters tensors of row numbers instead of values. The results show which rows of the files
form a parameter, and no tensor is read.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# Operations of converters that only reorder rows.
_MOVING = {"Chunk", "Concatenate", "Interleave", "MergeModulelist", "Split", "SplitModulelist"}
# A limit on the pieces of a parameter: each piece is a separate read.
_MAX_PIECES = 4096


class Elements(NamedTuple):
    """A range of elements of a tensor in the files."""

    name: str
    begin: int
    end: int


class Layout(NamedTuple):
    """A parameter's shape, and the pieces of tensors in the files that form it, one after the other."""

    shape: tuple[int, ...]
    pieces: list[Elements]


class Converted(NamedTuple):
    """The layouts of a model's tensors, and the names in the files that the model does not have."""

    layouts: dict[str, Layout]
    unexpected: list[str]


def by_transformers(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, torch.Tensor]
) -> Converted | None:
    """Return how the tensors of a transformers model are stored in its files.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    shapes : mapping of str to tuple of int
        The shapes of the tensors in its files.
    wanted : mapping of str to torch.Tensor
        The model's parameters and persistent buffers, on any device.

    Returns
    -------
    Converted or None
        None if this is not a transformers model, or transformers is older than 5 and has no such rules.

    Raises
    ------
    ValueError
        A parameter does not consist of rows of the files, or two tensors of the files map to the same parameter.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    try:
        mappings = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None
    mapping = mappings.get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    begun: dict[str, _Conversion] = {}
    renamed: dict[str, str] = {}
    unexpected = []
    rename, prefix = loading.rename_source_key, model.base_model_prefix
    # The same order of attempts as in transformers' own loader, convert_and_load_state_dict_in_model.
    for name in sorted(shapes, key=loading.dot_natural_key):
        target, pattern = rename(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename(name, [], [], prefix, wanted)
        if name == target and name in wanted and shapes[name] == tuple(wanted[name].shape):
            pattern = None  # the files have this tensor in the model's own form
        if target not in wanted:
            unexpected.append(name)
        elif pattern is not None:
            conversion = begun.get(target)
            if conversion is None:
                own = copy.deepcopy(of_pattern[pattern])
                conversion = begun[target] = _Conversion(target, own)
            conversion.add(pattern, name, shapes[name])
        elif target in renamed:
            raise ValueError(
                f"files: {renamed[target]} and {name} both map to the model's {target}"
            )
        else:
            renamed[target] = name
    layouts = {
        target: Layout(shapes[name], [Elements(name, 0, math.prod(shapes[name]))])
        for target, name in renamed.items()
    }
    for conversion in begun.values():
        for target, layout in conversion.layouts(model).items():
            if target in layouts:
                raise ValueError(
                    f"files: {layouts[target].pieces[0].name} and {layout.pieces[0].name} both map to the model's "
                    f"{target}"
                )
            layouts[target] = layout
    return Converted(layouts, unexpected)


class _Conversion:
    """One application of a converter to row numbers."""

    def __init__(self, target: str, converter: Any) -> None:
        self._target = target
        self._converter = converter
        self._names: list[str] = []
        self._begins = [0]  # the first row number of each tensor, and the end
        # The shape of a row: (the length of the last dimension,), or () for tensors of one dimension. None before the
        # first add().
        self._row: tuple[int, ...] | None = None

    def add(self, pattern: str, name: str, shape: tuple[int, ...]) -> None:
        """Give the converter a tensor of consecutive row numbers in place of a tensor of the files."""
        row = shape[-1:] if len(shape) > 1 else ()
        if self._row not in (None, row):
            raise self._refusal(f"{self._names[0]} and {name} have different shapes")
        self._row = row
        begin = self._begins[-1]
        self._names.append(name)
        self._begins.append(begin + math.prod(shape[: len(shape) - len(row)]))
        rows = torch.arange(begin, self._begins[-1], device="cpu")
        counted = rows.view(*shape[:-1], 1) if row else rows.view(shape)
        # The last dimension has length 1 here, with the row's number in place of its elements. A converter may reorder
        # rows. If it splits or joins them, the last dimension gets another length, and _layout() refuses that.
        self._converter.add_tensor(self._target, name, pattern, counted)

    def layouts(self, model: Any) -> dict[str, Layout]:
        """Return the layouts of the parameters that the converter makes."""
        others = {type(each).__name__ for each in self._converter.operations} - _MOVING
        if others:
            raise self._refusal(
                f"with {', '.join(sorted(others))}, which changes more than the order of rows"
            )
        try:
            made = self._converter.convert(self._target, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, AttributeError) as error:
            raise self._refusal(f"which fails: {error}") from error
        return {
            name: self._layout(rows[0] if isinstance(rows, list) else rows)
            for name, rows in made.items()
        }

    def _layout(self, rows: torch.Tensor) -> Layout:
        assert self._row is not None
        if self._row and rows.shape[-1] != 1:
            raise self._refusal("which splits or joins rows")
        row = math.prod(self._row)
        flat = rows.reshape(-1)
        # Pieces end where row numbers stop being consecutive, or where the next tensor of the files begins.
        owners = torch.bucketize(flat, torch.tensor(self._begins[1:], device="cpu"), right=True)
        ends = torch.nonzero((flat[1:] != flat[:-1] + 1) | (owners[1:] != owners[:-1]))
        edges = [0, *(ends.reshape(-1) + 1).tolist(), len(flat)] if len(flat) else [0]
        if len(edges) > _MAX_PIECES:
            raise self._refusal(f"in {len(edges) - 1} pieces, more than {_MAX_PIECES}")
        pieces = []
        for begin, end in itertools.pairwise(edges):
            owner = int(owners[begin])
            first = int(flat[begin]) - self._begins[owner]
            pieces.append(Elements(self._names[owner], first * row, (first + end - begin) * row))
        return Layout((*rows.shape[:-1], *self._row) if self._row else tuple(rows.shape), pieces)

    def _refusal(self, why: str) -> ValueError:
        names = self._names[0] if len(self._names) == 1 else f"{self._names[0]} and others"
        return ValueError(
            f"files: transformers makes {self._target} from {names}, {why}: this cannot be streamed. Load the model "
            "with transformers, save its state_dict() with save_file(), and stream that file"
        )
