"""``tensorferry bench``: its options and its output."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import (
    make_console,
    make_table,
    print_json,
    progress_bar,
    say,
    show,
)
from tensorferry.cli.exit_codes import FAILED, UNUSABLE, ExitError, exiting_with
from tensorferry.cli.options import command_with
from tensorferry.cli.parsing import existing_folder
from tensorferry.cli.tables import comparison_cells
from tensorferry.tuning.bench import BenchError, Job, Place, Results, problems_of, run

if TYPE_CHECKING:
    from rich.console import Console

_STATE_NBYTES = 8  # of AdamW in fp32, for each parameter; in GB for each 10^9 of them
# The options that set a handle's parameters, each with the parameter's name.
_SETTINGS = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "io_parallel": "intra_op_parallelism",
    "io_engine": "engine",
    "single_submit": "single_submit",
}
# Options of DeepSpeed's ds_io that are accepted without effect.
_ACCEPTED = (
    "slow_bounce_buffer",
    "torch_legacy_save",
    "fast_io_size",
    "csv",
    "sequential_requests",
)


def run_bench(given: dict[str, Any]) -> None:
    """Measure how fast files are written and read.

    Reads are cold: the file is dropped from the page cache before each read. All options of DeepSpeed's ds_io are
    accepted.
    """
    job, notes = make_job(given)
    results = measure(job)
    results.notes[:0] = notes
    if given["json"]:
        print_json(results.as_dict())
    else:
        _show(results, make_console())


bench = command_with("bench", run_bench)


def measure(job: Job) -> Results:
    """Run a job. An error is reported in one line, with exit code 1."""
    with exiting_with(FAILED, BenchError), progress_bar() as progress:
        return run(job, progress)


def make_job(given: dict[str, Any]) -> tuple[Job, list[str]]:
    """Return the job for the options, and notes on them. Exit with 2 if they are invalid."""
    problems: list[str] = []
    places = _places(given, problems)
    memory = given["memory"]
    notes = [f"--{name.replace('_', '-')} has no effect" for name in _ACCEPTED if given[name]]
    memory = "accelerator" if given["use_accelerator_pin_memory"] else memory
    if memory == "accelerator" and not given["gpu"]:
        from tensorferry.tuning import gpus

        if gpus.device_count() == 0:
            # ds_io also uses ordinary memory here: DeepSpeed's CPU accelerator returns the tensor without pinning it.
            notes.append(
                "memory cannot be pinned without a CUDA device: transfers use ordinary memory"
            )
            memory = "ordinary"
    if given["gpu"] and (memory is None or given["use_gds"]):
        memory = "gpu"
    values = {option: given[option] for option in _SETTINGS if given[option]}
    both = given["read"] == given["write"]
    shared = {each.name for each in dataclasses.fields(Job)} & given.keys() - {"memory", "engine"}
    job = Job(
        places=places,
        operations=tuple(name for name in ("write", "read") if both or given[name]),
        io_nbytes=given["io_size"],
        engine=given["engine"],
        settings={_SETTINGS[option]: value for option, value in values.items()},
        memory=memory or "locked",
        **{name: given[name] for name in shared},
    )
    problems += problems_of(job)
    if problems:
        raise ExitError(UNUSABLE, problems)
    if given["multi_process"] not in (1, len(places)):
        notes.append(
            "--multi-process has no effect: the number of processes is the number of entries in "
            f"--folder-to-device-mapping ({len(places)})"
        )
    return job, notes


def _places(given: dict[str, Any], problems: list[str]) -> tuple[Place, ...]:
    names = {"path": "FOLDER", "folder": "--folder"}
    names["folder_to_device_mapping"] = "--folder-to-device-mapping"
    chosen = [name for name in names if given[name]]
    if len(chosen) != 1:
        options = ", ".join(names[name] for name in chosen) or "FOLDER"
        problems.append(f"{options}: choose one of them" if chosen else f"{options}: missing")
        return ()
    if chosen != ["folder_to_device_mapping"]:
        return tuple(Place(given[chosen[0]], n) for n in range(given["multi_process"]))
    places = []
    for mapping in given["folder_to_device_mapping"]:
        name, _, device = mapping.rpartition(":")
        if not name or not device.isascii() or not device.isdigit():
            problems.append(
                f"{names[chosen[0]]}: {mapping!r} is not FOLDER:DEVICE, such as /mnt/nvme0:0"
            )
            continue
        try:
            places.append(Place(existing_folder(name), int(device)))
        except typer.BadParameter as error:
            problems.append(f"{names[chosen[0]]}: {error.message}")
    return tuple(places)


def _show(results: Results, console: Console) -> None:
    job = results.job
    memory = f"{job.memory} memory" if not job.gpu else "GPU memory"
    memory += f" through {job.memory} memory" if job.gpu and job.memory != "gpu" else ""
    say(
        console,
        f"{len(job.places)} x {format_nbytes(job.io_nbytes)} in "
        + ", ".join(dict.fromkeys(str(place.folder) for place in job.places))
        + f", loops: {job.loops} after {job.warmup_loops} to warm up, {memory}",
    )
    table = make_table([""], ("GB/s", "min .. max", "p50 ms", "p99 ms", "CPU s/GB", "+MiB"))
    words = []
    for comparison in results.comparisons:
        for row in comparison.rows:
            if not row.usable:
                continue
            name, last = f"{comparison.name} {row.label}", row.samples[-1].details
            if len(job.places) > 1:
                for number in range(len(job.places)):
                    samples = [sample.details["processes"][number] for sample in row.samples]
                    each = dataclasses.replace(row, samples=samples)
                    table.add_row(f"{name} {number}", *comparison_cells(each), style="dim")
            table.add_row(name, *comparison_cells(row))
            if last["settings"]:
                words.append(f"{name}: {_describe(last['settings'])}")
            if last["gpu"]:
                words.append(f"{name}: {_describe_gpu(last['gpu'])}")
    show(console, table)
    say(
        console,
        "GB: 10^9 bytes. p50, p99: latency of one block. +MiB: memory in addition to the buffer. Reads are cold.",
    )
    if seconds := _step_seconds(results):
        words.append(
            f"offload_optimizer with AdamW's fp32 state in this folder: about {seconds:.2g} s of I/O a step for each "
            "10^9 parameters"
        )
    for line in [*words, *(f"note: {note}" for note in dict.fromkeys(results.notes))]:
        say(console, line)


def _step_seconds(results: Results) -> float | None:
    """Return the time to read and write AdamW's fp32 state of 10^9 parameters, if reads and writes were measured."""
    medians = [comparison.median(results.job.method) for comparison in results.comparisons]
    speeds = [median for median in medians if median]
    if len(speeds) < 2 or results.job.method == "torch_io":
        return None
    return sum(_STATE_NBYTES / speed for speed in speeds)


def _describe_gpu(gpu: dict[str, Any]) -> str:
    """Describe how the bytes of GPUs were transferred in all loops."""
    words = f"{gpu['gpu_nbytes'] / 1e9:.3f} GB of GPU memory in all loops"
    if "compat" not in gpu:
        return f"{words}, through page-locked buffers"
    how = "compat mode, which uses host memory" if gpu["compat"] else "native"
    return f"{words}, {gpu['gds_nbytes'] / 1e9:.3f} GB of them by cuFile ({how})"


def _describe(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {format_nbytes(value) if name == 'block_size' else value}"
        for name, value in settings.items()
    )
