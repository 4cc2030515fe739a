"""``tensorferry-ds-nvme-tune``: DeepSpeed's ``ds_nvme_tune``, its options and its last lines, on tensorferry.

It sweeps what theirs does unless told otherwise, one engine only, but drops slow settings early and stores the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.cli.leaving import Parser, leaving_well, printable
from tensorferry.sizes import parse_nbytes
from tensorferry.tuning.space import deepspeed_space
from tensorferry.tuning.tune import SMALLEST_NBYTES, Job

if TYPE_CHECKING:
    import argparse

    from tensorferry.tuning.tune import Result

_LOG_DIRECTORY = "_aio_bench_logs"
_LOG_NAME = "tune.json"
_MAX_LOOPS = 1000
_THEIR_GB = 1 << 30


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, or say what it needs."""
    options = _parser().parse_args(arguments)
    try:
        from tensorferry.cli import tune as command
        from tensorferry.cli.consoles import make_console, say
        from tensorferry.cli.tune_view import print_result
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"this needs {missing.name}; install it with: pip install 'tensorferry[cli]'")
    with leaving_well("tensorferry-ds-nvme-tune"):
        folders = command.absolute(options.nvme_dir)
        problems = command.folder_problems("--nvme_dir", folders) + _problems(options)
        space = command.checked_space(options.sweep_config, deepspeed_space(), problems)
        space = command.space_on_gpus(space, options.gpu, options.gds, problems)
        log_directory = Path(options.log_dir)
        if not problems:
            try:
                log_directory.mkdir(parents=True, exist_ok=True)
            except OSError as problem:
                command.fail([f"--log_dir: {log_directory}: {problem.strerror}"], 1)
        command.fail(problems)
        job = Job(
            folders,
            space,
            parse_nbytes(options.io_size),
            read=not options.no_read,
            write=not options.no_write,
            loops=options.loops,
            gpu=options.gpu or options.gds,
            gds=options.gds,
        )
        console = make_console()
        if options.verbose:
            say(console, printable(f"args = {options}"))
        if options.flush_page_cache:
            say(console, "--flush_page_cache: not needed, reads do not come from the page cache")
        say(console, printable(f"Running DeepNVMe performance tuning on {options.nvme_dir}"))
        result = command.run(console, job, save=not options.no_save)
        if options.verbose:
            print_result(console, result)
        _print_as_theirs(result)
        log = log_directory / _LOG_NAME
        try:
            log.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        except OSError as problem:
            command.fail([f"--log_dir: {log}: {problem.strerror}"], 1)
        if result.not_stored:
            command.fail([f"not stored: {result.not_stored}"], 1)


def _print_as_theirs(result: Result) -> None:
    """Print what ds_nvme_tune ends with; its booleans are real ones here, not texts that are all true."""
    rates = {name: rate["median"] / _THEIR_GB for name, rate in result.rates().items()}
    words = [f"{name} = {rates[name]:5.2f}" for name in ("read", "write") if name in rates]
    print(f"Best performance (GB/sec): {', '.join(words)}")
    print(json.dumps(result.deepspeed(), indent=3))


def _problems(options: argparse.Namespace) -> list[str]:
    """Return all that is wrong with the options, folders and sweep apart."""
    problems = []
    try:
        nbytes = parse_nbytes(options.io_size)
    except ValueError as problem:
        problems.append(f"--io_size: {problem}")
    else:
        if nbytes < SMALLEST_NBYTES:
            problems.append(f"--io_size: {options.io_size} is less than {SMALLEST_NBYTES} bytes")
    if not 1 <= options.loops <= _MAX_LOOPS:
        problems.append(f"--loops: {options.loops} is not between 1 and {_MAX_LOOPS}")
    if options.no_read and options.no_write:
        problems.append("--no_read, --no_write: nothing is left to measure")
    return problems


def _parser() -> Parser:
    parser = Parser(
        prog="tensorferry-ds-nvme-tune",
        description="Find the aio settings for a drive: ds_nvme_tune's options, tensorferry's search.",
    )
    add = parser.add_argument
    add(
        "--nvme_dir",
        nargs="+",
        required=True,
        metavar="FOLDER",
        help="writable folders on NVMe drives",
    )
    add(
        "--sweep_config",
        type=Path,
        metavar="PATH",
        help="JSON with lists of values to try (block_size, queue_depth, sequential_requests, single_submit, "
        "io_parallel)",
    )
    add("--no_read", action="store_true", help="do not measure reading")
    add("--no_write", action="store_true", help="do not measure writing")
    add(
        "--io_size",
        default="400M",
        metavar="BYTES",
        help="bytes written and read in each folder (default 400M)",
    )
    add(
        "--gpu",
        action="store_true",
        help="move CUDA tensors: the first folder's is on GPU 0, and so on",
    )
    add("--gds", action="store_true", help="--gpu, as gds_handle does it (GPUDirect Storage)")
    add(
        "--flush_page_cache",
        action="store_true",
        help="accepted; reads never come from the page cache",
    )
    add(
        "--log_dir",
        default=_LOG_DIRECTORY,
        metavar="FOLDER",
        help=f"folder for every measurement, as JSON (default {_LOG_DIRECTORY})",
    )
    add(
        "--loops",
        type=int,
        default=1,
        metavar="N",
        help="times the data is moved in each measurement",
    )
    add("--verbose", action="store_true", help="print the arguments and all tables")
    add("--no_save", action="store_true", help="do not store the settings for use (ours)")
    return parser


if __name__ == "__main__":
    main()
