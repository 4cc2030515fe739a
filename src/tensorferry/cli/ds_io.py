"""``tensorferry-ds-io``: DeepSpeed's ds_io, on tensorferry; the same options, defaults, files and result lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tensorferry.cli.leaving import FAILED, UNUSABLE, Parser, leaving_well, leaving_with
from tensorferry.tuning.bench.arguments import make_job
from tensorferry.tuning.bench.options import OPTIONS
from tensorferry.tuning.bench.run import BenchError, run
from tensorferry.tuning.options import BadArgumentsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.tuning.bench.results import Result

# What ds_io calls GB is 2^30 bytes.
_DS_IO_GB = 1 << 30
# Where its defaults are not those of `tensorferry bench`.
_DEFAULTS = {"block_size": "1M", "queue_depth": "32", "io_size": None}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit as the other commands do."""
    given = vars(_parser().parse_args(arguments))
    with leaving_well("tensorferry-ds-io"):
        with leaving_with(UNUSABLE, BadArgumentsError):
            job = make_job(write=not given["read"], keep_files=True, **given)
        for number, place in enumerate(job.places):
            print(f"process {number}: {place.folder}")
        with leaving_with(FAILED, BenchError):
            results = run(job)
        for note in results.notes:
            print(f"note: {note}", file=sys.stderr)
        for result in results.results:
            print("\n".join(result_lines(result)))


def result_lines(result: Result) -> list[str]:
    """Return the four lines that scripts look for in ds_io's output: seconds of all loops, and their speed."""
    operation = result.operation.capitalize()
    loops = len(result.seconds)
    nbytes = result.nbytes * loops
    task_seconds = max(result.summary(process).seconds for process in result.processes)
    lines = []
    for name, seconds in (("Task", task_seconds), ("E2E", sum(result.seconds))):
        lines += [
            f"{name} {operation} Latency = {seconds} sec",
            f"{name} {operation} Speed = {nbytes / seconds / _DS_IO_GB} GB/sec",
        ]
    return lines


def _parser() -> Parser:
    parser = Parser(
        prog="tensorferry-ds-io",
        description="Measure tensorferry as DeepSpeed's ds_io measures DeepNVMe. `tensorferry bench` can do more.",
    )
    for option in (each for each in OPTIONS if not each.ours):
        default = _DEFAULTS.get(option.name, option.default)
        parser.take(option, default, required=option.name == "io_size")
    return parser


if __name__ == "__main__":
    main()
