"""The options of ``tensorferry tune`` and ``tensorferry-ds-nvme-tune``, and the job that they ask for."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.cli.leaving import UNUSABLE, LeavingError
from tensorferry.tuning import gpus
from tensorferry.tuning.options import Option, count, folder_problems, nbytes, values_of
from tensorferry.tuning.space import space_from_json
from tensorferry.tuning.tune import SMALLEST_NBYTES, Job

if TYPE_CHECKING:
    from tensorferry.tuning.space import Space

_MAX_LOOPS = 1000

BOTH = (
    Option("no_read", "Do not look at reading."),
    Option("no_write", "Do not look at writing."),
    Option("gpu", "Move CUDA tensors: the first folder's is on GPU 0, and so on."),
    Option("gds", "--gpu, as gds_handle does it (GPUDirect Storage)."),
    Option(
        "sweep_config",
        "JSON with lists of values to try: block_size, queue_depth, io_parallel, single_submit, io_engine.",
        Path,
        "PATH",
    ),
    Option("no_save", "Do not store the settings for use."),
)
OPTIONS = (
    Option(
        "folders",
        "Folders on the drives to tune; several are measured at the same time.",
        str,
        "FOLDER",
        many=True,
        argument=True,
    ),
    Option(
        "io_size",
        "Bytes written and read in each folder, such as 400M. Default: what the drive moves in 0.3 s, at most a "
        "quarter of the free space and of the memory.",
        nbytes(SMALLEST_NBYTES),
        "BYTES",
    ),
    *BOTH,
    Option("full", "Measure all settings in full, rather than drop slow ones."),
    Option("quick", "Try a few settings only: seconds, not minutes."),
    Option("json", "Print the result with every measurement, and nothing else."),
    Option("plot", "Draw the heat maps here (.png; needs matplotlib).", Path, "PATH"),
    Option("show", "Show the stored settings (of the folders), and do no more."),
    Option("forget", "Remove the stored settings (of the folders), and do no more."),
)
THEIRS = (
    Option(
        "nvme_dir", "Writable folders on NVMe drives.", str, "FOLDER", many=True, repeated=False
    ),
    Option(
        "io_size",
        "Bytes written and read in each folder.",
        nbytes(SMALLEST_NBYTES),
        "BYTES",
        "400M",
    ),
    *BOTH,
    Option("flush_page_cache", "Accepted; reads never come from the page cache."),
    Option("log_dir", "Folder for every measurement, as JSON.", Path, "FOLDER", "_aio_bench_logs"),
    Option("loops", "Times the data is moved in each measurement.", count(1, _MAX_LOOPS), "N", "1"),
    Option("verbose", "Print the arguments and all tables."),
)


def make_job(
    options: tuple[Option, ...], given: dict[str, Any], space: Space, problems: list[str]
) -> Job:
    """Return the job that options ask for, ``space`` being what is tried unless they have another.

    Raises
    ------
    LeavingError
        They cannot be used, or there are problems already; it has all of them.
    """
    hyphen, folders_name, folders = "-", "FOLDER", given.get("folders")
    if options == THEIRS:
        hyphen, folders_name, folders = "_", "--nvme_dir", given["nvme_dir"]
    # Links followed; Path.resolve would raise where these lead in a circle.
    paths = tuple(Path(os.path.realpath(folder)) for folder in folders or ())
    if not paths:
        problems.append(f"{folders_name}: name a folder on the drive to tune")
    for path in paths:
        problems += folder_problems(folders_name, path)
    values = values_of(options, given, problems, hyphen)
    if values["sweep_config"] is not None:
        try:
            space = space_from_json(values["sweep_config"], space)
        except ValueError as problem:
            problems += [f"--sweep{hyphen}config: {line}" for line in str(problem).splitlines()]
    space = _on_gpus(space, values, problems)
    if values["no_read"] and values["no_write"]:
        both = f"--no{hyphen}read, --no{hyphen}write"
        problems.append(f"{both}: nothing is left to measure")
    if problems:
        raise LeavingError(UNUSABLE, problems)
    return Job(
        paths,
        space,
        values["io_size"],
        read=not values["no_read"],
        write=not values["no_write"],
        full=values.get("full", False),
        loops=values.get("loops", 1),
        gpu=values["gpu"] or values["gds"],
        gds=values["gds"],
    )


def _on_gpus(space: Space, values: dict[str, Any], problems: list[str]) -> Space:
    """Return the space for memory of GPUs, where that is wanted, or add to the problems why it cannot be measured."""
    gds = values["gds"]
    if not values["gpu"] and not gds:
        return space
    if reason := gpus.why_no_gpu():
        problems.append(f"{'--gds' if gds else '--gpu'}: {reason}")
    elif gds and (reason := gpus.why_no_gds()):
        problems.append(f"--gds: {reason}")
    elif gds and gpus.gds_uses_cufile():
        return dataclasses.replace(space, engine=(gpus.CUFILE,))
    return space
