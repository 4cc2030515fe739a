"""``tensorferry-ds-io``: DeepSpeed's ds_io on tensorferry, with the same options, defaults, files and result lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorferry.tuning.rounds import Comparison

_NAME = "tensorferry-ds-io"
# ds_io's GB is 2^30 bytes.
_DS_IO_GB = 1 << 30


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, and exit with the same codes as the other commands."""
    from tensorferry.cli import reporting_missing_packages

    with reporting_missing_packages():
        from tensorferry.cli.app import command_of, run_command
        from tensorferry.cli.options import command_with
        from tensorferry.cli.parsing import repeat_option

    given = sys.argv[1:] if arguments is None else arguments
    given = repeat_option(given, "folder_to_device_mapping")
    ds_io = command_with("ds_io", _ds_io, keep_files=True)
    run_command(command_of(ds_io, _NAME, _NAME), _NAME, given, _NAME)


def _ds_io(given: dict[str, Any]) -> None:
    """Measure tensorferry as DeepSpeed's ds_io measures DeepNVMe.

    Options can also be written with underscores. `tensorferry bench` has more options.
    """
    from tensorferry.cli.bench import make_job, measure

    job, notes = make_job(given | {"write": not given["read"]})
    for number, place in enumerate(job.places):
        print(f"process {number}: {place.folder}")
    results = measure(job)
    for note in [*notes, *results.notes]:
        print(f"note: {note}", file=sys.stderr)
    for comparison in results.comparisons:
        print("\n".join(result_lines(comparison)))


def result_lines(comparison: Comparison) -> list[str]:
    """Return the four lines that scripts parse in ds_io's output: the seconds of all loops, and the speed.

    "Task" is the time of the slowest process, "E2E" that from the first start to the last end of all processes.
    """
    operation, samples = comparison.name.capitalize(), comparison.rows[0].samples
    nbytes = sum(sample.nbytes for sample in samples)
    count = len(samples[0].details["processes"])
    tasks = [sum(s.details["processes"][n].seconds for s in samples) for n in range(count)]
    lines = []
    for name, seconds in (("Task", max(tasks)), ("E2E", sum(s.seconds for s in samples))):
        lines += [
            f"{name} {operation} Latency = {seconds} sec",
            f"{name} {operation} Speed = {nbytes / seconds / _DS_IO_GB} GB/sec",
        ]
    return lines


if __name__ == "__main__":
    main()
