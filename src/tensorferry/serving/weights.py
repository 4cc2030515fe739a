"""The common part of the loaders for vLLM and SGLang: their options, and reading the tensors from a model's files.

"The program" is the one of the two that loads the model.
"""

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
# A tensor is read together with the rest of its first and last page.
_PAGES_NBYTES = 2 * 4096


class Options(NamedTuple):
    """The options in ``model_loader_extra_config``.

    Attributes
    ----------
    memory_budget : int or str, optional
        The host memory for tensors that the model has not taken yet: a number of bytes, or a text such as ``"4GiB"``.
        By default 1 GiB, or the size of the largest tensor if it is larger.
    verify : bool
        Verify the bytes read against the checksums in the sidecar files, before the model gets them.
    broadcast : False, True or "auto"
        Whether each rank of a tensor-parallel model reads a part of the files and sends it to the others.
    """

    memory_budget: int | str | None = None
    verify: bool = False
    broadcast: Any = "auto"


def options_of(given: Any, program_options: tuple[str, ...] = ()) -> tuple[Options, dict[str, Any]]:
    """Return our options and the program's own, both from ``model_loader_extra_config``.

    ``program_options`` has the names of the latter. Raise ValueError or TypeError for an unknown or invalid option.
    """
    if not isinstance(given, dict):
        raise TypeError(f"model_loader_extra_config: {given!r} is not a dict")
    known = (*Options._fields, *program_options)
    for name in given:
        if name not in known:
            raise ValueError(
                f"model_loader_extra_config: load format {LOAD_FORMAT!r} has no option {name!r} (options: "
                f"{', '.join(known)})"
            )
    options = Options(**{name: given[name] for name in Options._fields if name in given})
    if options.memory_budget is not None:
        checked_nbytes(options.memory_budget, "memory_budget")
    if not isinstance(options.verify, bool):
        raise TypeError(f"verify: {options.verify!r} is not a bool")
    one_of(options.broadcast, "broadcast", ("auto", True, False))
    return options, {name: given[name] for name in program_options if name in given}


def check_files(paths: Sequence[str], index: Path | None) -> None:
    """Raise an error if a file is not a safetensors file, or if tensors that the index names are missing.

    The programs themselves only check that files exist. If a file lacks a tensor, vLLM reports a weight without a
    value, and SGLang continues without an error.
    """
    for path in paths:
        if not path.endswith(".safetensors"):
            raise ValueError(
                f"{path!r} is not a safetensors file, and load format {LOAD_FORMAT!r} reads only those (remedy: "
                "--load-format auto)"
            )
    if index is not None and index.exists():
        stored_tensors(index)


def tensors(
    paths: Sequence[str],
    options: Options,
    skip: Callable[[str], bool] = lambda _: False,
    process_group: Any = None,
    *,
    index: Path | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors in the files, except those for which ``skip(name)`` is True.

    The files are checked first, as by :func:`check_files`. With a process group, and unless ``broadcast`` is False (see
    :class:`Options`), the group's ranks may share the reading, and an error of one rank is raised on all ranks.
    """
    sizes: dict[str, int] = {}

    def look() -> None:
        check_files(paths, index)
        stored = stored_tensors(paths)
        sizes.update({name: one.tensor.nbytes for name, one in stored.items() if not skip(name)})

    if process_group is None or options.broadcast is False:
        look()
    else:
        from tensorferry.base.ranks import Ranks

        # call() raises an error of one rank on all. A rank that failed alone would leave the others waiting for it in
        # load_files().
        Ranks(process_group).call(look)
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
