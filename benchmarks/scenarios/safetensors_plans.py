"""Reading by plan: what eight tensor-parallel ranks read of one model, and what memory a budget takes.

Rules: a cold model; the ranks load their parts one after the other, and share the page cache as those of a node do.
Bytes are those that the kernel counts as fetched from storage. The budget is measured by the growth of a process's
peak memory while it reads all of the model and keeps nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import files
from benchmarks.harness import (
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
)
from benchmarks.measure import Stopwatch
from benchmarks.worker import workers

RANKS = 8
_RULES = {"*.rows": 0, "*.columns": 1}
_BUDGET_NBYTES = 256 * MIB
_PEER = "benchmarks.scenarios.safetensors_plans:Reader"


class Reader:
    """Reads by plan."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def save(self, path: str, nbytes: int) -> dict[str, Any]:
        """Write a model whose tensors are divided by rows, by columns, and not at all."""
        import safetensors.torch
        import torch

        width = 4096 if nbytes >= 256 * MIB else 512
        each = 4 * width * width  # two matrices of bfloat16
        state = {}
        for layer in range(max(1, nbytes // each)):
            for kind in ("rows", "columns"):
                matrix = torch.empty(width, width, dtype=torch.bfloat16).random_()
                state[f"layers.{layer}.{kind}"] = matrix
            state[f"layers.{layer}.norm"] = torch.ones(width, dtype=torch.bfloat16)
        safetensors.torch.save_file(state, path)
        return {}

    def load(self, path: str, rank: int) -> dict[str, Any]:
        """Load one rank's part, and say what was read for it."""
        from tensorferry.safetensors.plans import load_files, tensor_parallel_plan

        before = _fetched_nbytes()
        with Stopwatch() as watch:
            plan = tensor_parallel_plan(path, _RULES, rank, RANKS)
            needed = sum(tensor.nbytes for _, tensor in load_files(path, plan))
        return watch.result(needed, fetched_nbytes=_fetched_nbytes() - before)

    def pass_over(self, path: str) -> dict[str, Any]:
        """Read all tensors in a budget, and keep none."""
        from tensorferry.safetensors.plans import load_files

        nbytes = 0
        with Stopwatch() as watch:
            for _, tensor in load_files(path, memory_budget=_BUDGET_NBYTES):
                nbytes += tensor.nbytes
                del tensor
        return watch.result(nbytes)


def _fetched_nbytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def run(settings: Settings) -> Outcome:
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "model.safetensors"
        worker = make(_PEER)
        worker.call("save", path=str(path), nbytes=settings.nbytes)

        def load(number: int) -> Sample:
            files.make_cold(path)
            found = [worker.call("load", path=str(path), rank=rank) for rank in range(RANKS)]
            needed = sum(each["nbytes"] for each in found)
            fetched = sum(each["fetched_nbytes"] for each in found)
            return Sample(fetched / needed, sum(each["seconds"] for each in found), needed)

        def pass_over(number: int) -> Sample:
            files.make_cold(path)
            return worker.sample("pass_over", path=str(path))

        shares = Comparison(
            "safetensors plans, eight ranks", "cold", "of the bytes needed", higher_is_better=False
        )
        budget = Comparison("safetensors plans, a budget", f"{_BUDGET_NBYTES // MIB} MiB, cold")
        for comparison, label, action in (
            (shares, "tensor_parallel_plan", load),
            (budget, "load_files", pass_over),
        ):
            compare(settings, comparison, [Contender(label, "ours", action)])
            outcome.comparisons.append(comparison)
    share, passed = shares.row("tensor_parallel_plan"), budget.row("load_files")
    outcome.figures = [
        Figure("bytes read by eight ranks over needed", "<=", 1.1, share.median if share else None),
    ]
    if passed and passed.peak_growth_nbytes is not None:
        most = _BUDGET_NBYTES // MIB + 32
        grown = passed.peak_growth_nbytes / MIB
        outcome.figures.append(Figure("memory of load_files", "<=", most, grown, "MiB"))
    return outcome
