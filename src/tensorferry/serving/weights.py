"""What loaders of all programs have in common: their options, and the tensors of the files that a program has found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.base.checks import checked_nbytes, one_of
from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.sources import stored_tensors
from tensorferry.serving import LOAD_FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_BUDGET_NBYTES = 1 << 30
# A tensor is read with the rest of its first and its last page.
_PAGES_NBYTES = 2 * 4096


class Options(NamedTuple):
    """What may stand in ``model_loader_extra_config``.

    Attributes
    ----------
    memory_budget : int or str, optional
        Bytes of host memory for tensors that the model has not taken yet: a number, or text as ``"4GiB"``. By default
        1 GiB, or the largest tensor if that is larger.
    verify : bool
        Compare what is read with the checksums kept beside the files, before the model gets it.
    broadcast : False, True or "auto"
        Whether ranks of a tensor-parallel model read together: each a part, which the process group hands on.
    """

    memory_budget: int | str | None = None
    verify: bool = False
    broadcast: Any = "auto"


def options_of(given: Any, theirs: tuple[str, ...] = ()) -> tuple[Options, dict[str, Any]]:
    """Return our options and those that are the program's own; raise ValueError or TypeError for all others."""
    if not isinstance(given, dict):
        raise TypeError(f"model_loader_extra_config: {given!r} is not a dict")
    known = (*Options._fields, *theirs)
    for name in given:
        if name not in known:
            raise ValueError(
                f"model_loader_extra_config: load format {LOAD_FORMAT!r} has no option {name!r} (it has "
                f"{', '.join(known)})"
            )
    options = Options(**{name: given[name] for name in Options._fields if name in given})
    if options.memory_budget is not None:
        checked_nbytes(options.memory_budget, "memory_budget")
    if not isinstance(options.verify, bool):
        raise TypeError(f"verify: {options.verify!r} is not a bool")
    one_of(options.broadcast, "broadcast", ("auto", True, False))
    return options, {name: given[name] for name in theirs if name in given}


def check_files(paths: Sequence[str], index: Path | None) -> None:
    """Raise an error for files that are not safetensors, and for what an index names that is not there.

    Programs look for files only. Where one lacks a tensor, vLLM names a weight without a value, and SGLang goes on.
    """
    for path in paths:
        if not path.endswith(".safetensors"):
            raise ValueError(
                f"{path!r} is not a safetensors file, and load format {LOAD_FORMAT!r} reads no other (remedy: "
                "--load-format auto)"
            )
    if index is not None and index.exists():
        stored_tensors(index)


def tensors(
    paths: Sequence[str],
    options: Options,
    skip: Callable[[str], bool] = lambda _: False,
    process_group: Any = None,
) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors of files, but for those to be skipped; ranks of a group, if one is given, together."""
    sizes = {
        name: one.tensor.nbytes for name, one in stored_tensors(paths).items() if not skip(name)
    }
    budget = options.memory_budget
    if budget is None:
        budget = max(_BUDGET_NBYTES, max(sizes.values(), default=0) + _PAGES_NBYTES)
    plan = dict.fromkeys(sizes)
    broadcast = False if process_group is None else options.broadcast
    with load_files(
        paths,
        plan,
        memory_budget=budget,
        verify=options.verify,
        broadcast=broadcast,
        process_group=process_group,
    ) as found:
        yield from found
