"""``tensorferry-ds-io``: DeepSpeed's ds_io, on tensorferry; the same options, defaults, files and result lines."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tensorferry.cli.leaving import leaving_well
from tensorferry.tuning.bench.arguments import ENGINES, Arguments, make_job
from tensorferry.tuning.bench.run import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.tuning.bench.results import Result

# What ds_io calls GB is 2^30 bytes.
_DS_IO_GB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit as the other commands do."""
    given = _parser().parse_args(arguments)
    with leaving_well("tensorferry-ds-io"):
        job = make_job(
            Arguments(
                folder=given.folder,
                folder_to_device_mapping=given.folder_to_device_mapping,
                io_size=given.io_size,
                read=given.read,
                write=not given.read,
                multi_process=given.multi_process,
                engine=given.engine,
                block_size=given.block_size,
                queue_depth=given.queue_depth,
                io_parallel=given.io_parallel,
                single_submit=given.single_submit,
                sequential_requests=given.sequential_requests,
                loops=given.loops,
                warmup_loops=given.warmup_loops,
                include_warmup_time=given.include_warmup_time,
                different_file_each_iteration=given.different_file_each_iteration,
                validate=given.validate,
                memory="accelerator" if given.use_accelerator_pin_memory else None,
                gpu=given.gpu,
                use_gds=given.use_gds,
                slow_bounce_buffer=given.slow_bounce_buffer,
                fast_io_size=given.fast_io_size,
                torch_legacy_save=given.torch_legacy_save,
                keep_files=True,
            )
        )
        for number, place in enumerate(job.places):
            print(f"process {number}: {place.folder}")
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
    task_seconds = max(sum(process.seconds) for process in result.processes)
    lines = []
    for name, seconds in (("Task", task_seconds), ("E2E", sum(result.seconds))):
        lines += [
            f"{name} {operation} Latency = {seconds} sec",
            f"{name} {operation} Speed = {nbytes / seconds / _DS_IO_GB} GB/sec",
        ]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorferry-ds-io",
        description="Measure tensorferry as DeepSpeed's ds_io measures DeepNVMe. `tensorferry bench` can do more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--folder", metavar="FOLDER", help="folder to work in")
    option(
        "--folder_to_device_mapping",
        metavar="FOLDER:DEVICE",
        nargs="+",
        action="extend",
        default=[],
        help="folders, each with the number of a GPU, which counts only with --gpu; one process for each",
    )
    option("--io_size", required=True, metavar="BYTES", help="bytes of each file, such as 400M")
    option("--fast_io_size", default="64M", metavar="BYTES", help="buffer of torch_fastio")
    option("--read", action="store_true", help="read; else write")
    option("--multi_process", default="1", metavar="N", help="processes")
    option("--block_size", default="1M", metavar="BYTES", help="bytes of one submission")
    option("--queue_depth", default="32", metavar="N", help="blocks in flight at most")
    option("--single_submit", action="store_true", help="a system call for each block")
    option(
        "--sequential_requests",
        action="store_true",
        help="accepted; queues are always refilled as blocks complete",
    )
    option("--validate", action="store_true", help="compare file and memory after each transfer")
    option("--engine", default="aio_handle", metavar="NAME", help=", ".join(ENGINES))
    option("--loops", default="3", metavar="N", help="transfers that count")
    option("--io_parallel", metavar="N", help="threads that each have a queue")
    option("--gpu", action="store_true", help="move CUDA tensors, given to the handle as they are")
    option("--use_gds", action="store_true", help="use gds_handle (GPUDirect Storage)")
    option(
        "--slow_bounce_buffer",
        action="store_true",
        help="copy CUDA tensors by way of host memory that is made anew for each transfer",
    )
    option("--torch_legacy_save", action="store_true", help="torch.save's format before 1.6")
    option(
        "--use_accelerator_pin_memory",
        action="store_true",
        help="host memory pinned by torch; with --gpu, copy CUDA tensors by way of it",
    )
    option("--warmup_loops", default="1", metavar="N", help="transfers before those that count")
    option("--include_warmup_time", action="store_true", help="count them too")
    option("--different_file_each_iteration", action="store_true", help="a file for each loop")
    return parser


if __name__ == "__main__":
    main()
