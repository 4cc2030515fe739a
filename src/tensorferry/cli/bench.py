"""``tensorferry bench``: its options and its output."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import (
    AsJson,
    make_console,
    make_table,
    print_json,
    progress_bar,
    say,
    show,
)
from tensorferry.cli.exit_codes import FAILED, UNUSABLE, ExitError, exiting_with
from tensorferry.cli.parsing import FOLDER, existing_folder, number, size, switch, value
from tensorferry.cli.tables import comparison_cells
from tensorferry.transfer.settings import MAX_BLOCK_NBYTES, MAX_PARALLELISM, MAX_QUEUE_DEPTH
from tensorferry.tuning.bench import BenchError, Job, Place, Results, problems_of, run

if TYPE_CHECKING:
    from rich.console import Console

    from tensorferry.tuning.offload import Result as Prediction

_MAX_LOOPS = 1_000_000
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
# The options that have an effect with --offload.
_OF_OFFLOAD = ("path", "folder", "offload", "training", "io_size", "loops", "as_json")
# Explanations of a predicted step, for the optimizer alone and (True) for a complete training.
_NOTES = {
    False: "A step takes the longer of I/O and arithmetic.",
    True: "Arithmetic is that of AdamW. The model's own computation is not included: the forward pass, and the "
    "backward pass with its recomputation of the blocks. A step takes at least the longer of that and I/O. Compare the "
    "bytes written with the drive's endurance (TBW).",
}


Engine = Enum("Engine", {n: n for n in ("aio_handle", "files", "torch_io")}, type=str)  # type: ignore[misc]
IoEngine = Enum("IoEngine", {n: n for n in ("io_uring", "libaio", "threads")}, type=str)  # type: ignore[misc]
HostMemory = Enum("HostMemory", {n: n for n in ("locked", "ordinary", "accelerator")}, type=str)  # type: ignore[misc]


def bench(
    *,
    path: Optional[Path] = typer.Argument(None, help="The folder; the same as --folder.", **FOLDER),
    folder: Optional[Path] = typer.Option(
        None, "--folder", help="The folder to work in.", **FOLDER
    ),
    folder_to_device_mapping: list[str] = value(
        [],
        "--folder-to-device-mapping",
        "FOLDER:DEVICE",
        "A folder and the number of a GPU, which is used only with --gpu. Repeat the option; each gets one process.",
    ),
    io_size: int = size(1 << 30, "--io-size", "The size of each file, such as 400M."),
    read: bool = switch("--read", "Only read."),
    write: bool = switch("--write", "Only write."),
    multi_process: int = number(
        1, "--multi-process", (1, 1024), "The number of processes, each with a separate file."
    ),
    loops: int = number(3, "--loops", (1, _MAX_LOOPS), "The number of measured transfers."),
    warmup_loops: int = number(
        1,
        "--warmup-loops",
        (0, _MAX_LOOPS),
        "The number of transfers before the measured ones, which are not counted.",
    ),
    include_warmup_time: bool = switch(
        "--include-warmup-time", "Also count the transfers of --warmup-loops."
    ),
    different_file_each_iteration: bool = switch(
        "--different-file-each-iteration",
        "Use a new file for each loop. By default, writes overwrite the file of the first loop.",
    ),
    validate: bool = switch(
        "--validate", "Compare file and memory after each transfer, outside the measured time."
    ),
    keep_files: bool = switch(
        "--keep-files",
        "Use ds_io's file names, read existing files, and keep all files for the next run.",
    ),
    engine: Engine = value(
        "aio_handle",
        "--engine",
        "aio_handle|files|torch_io",
        "Asynchronous calls and wait(), tensorferry.open(), or torch.save and torch.load.",
    ),
    io_engine: Optional[IoEngine] = value(
        None,
        "--io-engine",
        "io_uring|libaio|threads",
        "The I/O engine. Default: the first that works.",
    ),
    block_size: Optional[int] = size(
        None,
        "--block-size",
        "The size of one block. By default, --block-size, --queue-depth and --io-parallel are those of a handle "
        "without explicit settings.",
        maximum=MAX_BLOCK_NBYTES,
    ),
    queue_depth: Optional[int] = number(
        None, "--queue-depth", (1, MAX_QUEUE_DEPTH), "The maximum number of blocks in flight."
    ),
    io_parallel: Optional[int] = number(
        None,
        "--io-parallel",
        (1, MAX_PARALLELISM),
        "The number of worker threads, each with a queue.",
    ),
    single_submit: bool = switch("--single-submit", "Use one system call for each block."),
    memory: Optional[HostMemory] = value(
        None,
        "--memory",
        "locked|ordinary|accelerator",
        "The host memory: from tensorferry.empty() (default); unaligned and on small pages; or pinned by torch. With "
        "--gpu: copy all bytes through this memory, instead of passing the CUDA tensor to the handle.",
    ),
    use_accelerator_pin_memory: bool = switch(
        "--use-accelerator-pin-memory", "The same as --memory accelerator."
    ),
    gpu: bool = switch("--gpu", "Transfer CUDA tensors; without --memory, directly."),
    use_gds: bool = switch(
        "--use-gds", "Use gds_handle (GPUDirect Storage) instead of aio_handle."
    ),
    compare: bool = switch(
        "--compare",
        "Also measure plain Python and fio, alternately, with the same sizes and settings.",
    ),
    slow_bounce_buffer: bool = switch("--slow-bounce-buffer", "Accepted, without effect."),
    torch_legacy_save: bool = switch("--torch-legacy-save", "Accepted, without effect."),
    fast_io_size: Optional[str] = value(
        None, "--fast-io-size", "BYTES", "Accepted, without effect."
    ),
    sequential_requests: bool = switch("--sequential-requests", "Accepted, without effect."),
    csv: bool = switch("--csv", "Accepted, without effect: use --json."),
    offload: Optional[str] = value(
        None,
        "--offload",
        "PARAMETERS",
        "Instead, predict the time of an AdamW step with the state in the folder, for a model with this number of "
        "parameters, such as 7B. Supports --training, --io-size, --loops and --json.",
    ),
    training: bool = switch(
        "--training",
        "With --offload: parameters and gradients are in the folder, too. Shows the bytes a step reads and writes.",
    ),
    plot: Optional[Path] = value(
        None, "--plot", "FILE", "Also draw a chart (.svg, .png or .pdf; needs matplotlib)."
    ),
    as_json: AsJson = False,
) -> None:
    """Measure how fast files are written and read.

    Reads are cold: the file is dropped from the page cache before each read. All options of DeepSpeed's ds_io are
    accepted.
    """
    given = dict(locals())
    if offload is not None:
        _predict(given)
        return
    if training:
        raise ExitError(UNUSABLE, ["--training: needs --offload PARAMETERS"])
    job, notes = make_job(given)
    if plot is not None:
        from tensorferry.tuning.plot import draw, problem_of

        if problem := problem_of(plot):
            raise ExitError(UNUSABLE, [f"--plot: {problem}"])
    results = measure(job)
    results.notes[:0] = notes
    if as_json:
        print_json(results.as_dict())
    else:
        _show(results, make_console())
    if plot is not None:  # after the figures, which must not be lost if the chart cannot be written
        titles = {"write": "writing", "read": "reading"}
        try:
            draw({titles[each.name]: each for each in results.comparisons}, plot)
        except OSError as error:
            raise ExitError(FAILED, [f"--plot: {plot}: {error.strerror}"]) from None


def measure(job: Job) -> Results:
    """Run a job. An error is reported in one line, with exit code 1."""
    with exiting_with(FAILED, BenchError), progress_bar() as progress:
        return run(job, progress)


def make_job(given: dict[str, Any]) -> tuple[Job, list[str]]:
    """Return the job for the options, and notes on them. Exit with 2 if they are invalid."""
    problems: list[str] = []
    places = _places(given, problems)
    memory = given["memory"].value if given["memory"] else None
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
    if "io_engine" in values:
        values["io_engine"] = values["io_engine"].value
    both = given["read"] == given["write"]
    shared = {each.name for each in dataclasses.fields(Job)} & given.keys() - {"memory", "engine"}
    job = Job(
        places=places,
        operations=tuple(name for name in ("write", "read") if both or given[name]),
        io_nbytes=given["io_size"],
        engine=given["engine"].value,
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
    for line in [*words, *(f"note: {note}" for note in dict.fromkeys(results.notes))]:
        say(console, line)


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


def _predict(given: dict[str, Any]) -> None:
    from tensorferry.tuning import offload

    folders = [given[name] for name in ("path", "folder") if given[name]]
    try:
        parameters = offload.parse_count(given["offload"])
    except ValueError as error:
        raise ExitError(UNUSABLE, [f"--offload: {error}"]) from None
    problems = [] if len(folders) == 1 else ["--offload: needs one folder"]
    for name, parameter in inspect.signature(bench).parameters.items():
        default = getattr(parameter.default, "default", parameter.default)
        if name not in _OF_OFFLOAD and given[name] != default:
            problems.append(f"--{name.replace('_', '-')}: has no effect with --offload")
    if given["io_size"] < offload.SMALLEST_NBYTES:
        problems.append(f"--io-size: {given['io_size']} is less than 1M")
    if reason := offload.unusable_reason():
        problems.append(f"--offload: {reason}")
    if problems:
        raise ExitError(UNUSABLE, problems)
    job = offload.Job(parameters, folders[0], given["io_size"], given["loops"], given["training"])
    with progress_bar() as progress:
        predicted = offload.run(job, progress)
    if given["as_json"]:
        print_json(predicted.as_dict())
    else:
        _show_prediction(predicted, make_console())


def _show_prediction(result: Prediction, console: Console) -> None:
    job, gb = result.job, 1e9
    content = "parameters, gradients and state" if job.training else "its state"
    say(
        console,
        f"AdamW of {job.parameters / 1e6:,.6g} M parameters, {content} in {job.folder}: concurrent reads and writes "
        f"{result.nbytes_per_second / gb:.2f} GB/s in total, arithmetic {result.parameters_per_second / 1e6:,.0f} M "
        f"parameters a second with {result.threads} threads",
    )
    numbers = ("budget GB", "moved GB", "written GB", "I/O s", "arithmetic s", "step s", "limit")
    # The time of a training step also depends on the model's computation, so these columns are left out.
    shown = numbers[:5] if job.training else numbers
    table = make_table(["parameters"], shown)
    for each in result.predictions:
        cells = [
            f"{each.budget_nbytes / gb:,.4g}" if each.budget_nbytes else "small",
            f"{each.moved_nbytes / gb:,.4g}",
            f"{each.written_nbytes / gb:,.4g}",
            *(f"{s:.3g}" for s in (each.io_seconds, each.arithmetic_seconds, each.step_seconds)),
            each.limit,
        ]
        table.add_row(f"{each.layout}: {each.state_nbytes / gb:,.4g} GB", *cells[: len(shown)])
    show(console, table)
    say(
        console,
        f"GB: 10^9 bytes. small: a budget that is small compared with {content}. {_NOTES[job.training]}",
    )
    if max(each.state_nbytes for each in result.predictions) > result.free_nbytes:
        free = f"{result.free_nbytes / gb:,.4g} GB free, less than the largest of these states"
        say(console, f"note: {job.folder} has {free}")
