"""``tensorferry bench``: how its results are shown. What it takes is said in ``tuning.bench.options``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import (
    counted,
    make_console,
    make_table,
    print_json,
    progress_bar,
    say,
    show,
)
from tensorferry.cli.leaving import FAILED, UNUSABLE, LeavingError, leaving_with
from tensorferry.cli.options import taking
from tensorferry.tuning.bench.options import OPTIONS
from tensorferry.tuning.options import Option

if TYPE_CHECKING:
    from rich.console import Console

    from tensorferry.tuning.bench.arguments import Job
    from tensorferry.tuning.bench.results import Results, Summary
    from tensorferry.tuning.offload import Result as Prediction

_OURS = (
    Option(
        "offload",
        "Predict instead how long a step of AdamW takes with its state in the folder, for a model of so many "
        "parameters, say 7B. Takes --io-size, --loops and --json.",
        str,
        "PARAMETERS",
    ),
    Option("json", "Print all of it as JSON, each loop included, and nothing else."),
    Option("csv", "Print the figures as CSV, and nothing else."),
)


@taking(*OPTIONS, *_OURS)
def bench(*, offload: str | None, json: bool, csv: bool, **given: Any) -> None:
    """Measure how fast files are written and read.

    Reads are cold: the file is dropped from the page cache before each. Takes all options of DeepSpeed's ds_io.
    """
    from tensorferry.tuning.options import BadArgumentsError

    if offload is not None:
        from tensorferry.tuning import offload as prediction

        with leaving_with(UNUSABLE, BadArgumentsError):
            asked = prediction.make_job(offload=offload, **given)
        with progress_bar() as listener:
            predicted = prediction.run(asked, listener)
        if json:
            print_json(predicted.as_dict())
        else:
            _show_prediction(predicted, make_console())
        return
    if json and csv:
        raise LeavingError(UNUSABLE, ["--json, --csv: choose one of them"])
    from tensorferry.tuning.bench.arguments import make_job
    from tensorferry.tuning.bench.run import BenchError, run

    with leaving_with(UNUSABLE, BadArgumentsError):
        job = make_job(**given)
    with leaving_with(FAILED, BenchError), progress_bar() as listener:
        results = run(job, listener)
    if json:
        print_json(results.as_dict())
    elif csv:
        print(results.as_csv(), end="")
    else:
        _show(results, make_console())


def _show(results: Results, console: Console) -> None:
    job = results.job
    say(
        console,
        f"{len(job.places)} x {format_nbytes(job.io_nbytes)} in "
        + ", ".join(dict.fromkeys(str(place.folder) for place in job.places))
        + f", {counted(job.loops, 'loop')} after {job.warmup_loops} to warm up, {_memory_in_words(job)}",
    )
    numbers = ("GB/s", "min .. max", "total", "p50 ms", "p99 ms", "CPU s/GB", "+MiB")
    table = make_table([""], numbers)
    for result in results.results:
        name = f"{result.operation} {result.way}"
        for process, summary in result.summaries():
            if process is None:
                table.add_row(name, *_cells(summary))
            elif len(result.processes) > 1:
                table.add_row(f"{name} {process.process}", *_cells(summary), style="dim")
    show(console, table)
    say(
        console,
        "GB: 10^9 bytes. p50, p99: of one block. +MiB: memory besides the buffer. Reads are cold.",
    )
    for result in results.results:
        used = [_in_words(process.settings) for process in result.processes if process.settings]
        used += [_gpu_in_words(result.gpu)] if result.gpu is not None else []
        for words in dict.fromkeys(used):
            say(console, f"{result.operation} {result.way}: {words}")
    for note in results.notes:
        say(console, f"note: {note}")


def _cells(summary: Summary) -> list[str]:
    latency = summary.latency_microseconds or {}
    growth = summary.peak_growth_nbytes
    return [
        f"{summary.gb_per_second_median:.3f}",
        f"{min(summary.gb_per_second):.2f} .. {max(summary.gb_per_second):.2f}",
        f"{summary.gb_per_second_total:.3f}",
        *(f"{latency[name] / 1000:.2f}" if name in latency else "-" for name in ("p50", "p99")),
        f"{summary.cpu_seconds_per_gb:.3f}",
        "-" if growth is None else f"{growth / (1 << 20):.0f}",
    ]


def _memory_in_words(job: Job) -> str:
    if not job.gpu:
        return f"{job.memory} memory"
    if job.memory == "gpu":
        return "GPU memory"
    return (
        f"GPU memory by way of {job.memory} memory{' made anew' if job.slow_bounce_buffer else ''}"
    )


def _gpu_in_words(gpu: dict[str, Any]) -> str:
    """Return how bytes of GPUs went, all loops together."""
    words = f"{gpu['gpu_nbytes'] / 1e9:.3f} GB of GPU memory in all loops"
    if "compat" not in gpu:
        return f"{words}, through page-locked buffers"
    how = "compat: no way around host memory" if gpu["compat"] else "native"
    return f"{words}, {gpu['gds_nbytes'] / 1e9:.3f} GB of them by cuFile ({how})"


def _in_words(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {format_nbytes(value) if name == 'block_size' else value}"
        for name, value in settings.items()
    )


def _show_prediction(result: Prediction, console: Console) -> None:
    job, gb = result.job, 1e9
    say(
        console,
        f"AdamW of {job.parameters / 1e6:,.6g} M parameters, its state in {job.folder}: reading and writing at once "
        f"{result.nbytes_per_second / gb:.2f} GB/s together, arithmetic {result.parameters_per_second / 1e6:,.0f} M "
        f"parameters a second with {result.threads} threads",
    )
    numbers = ("budget GB", "moved GB", "I/O s", "arithmetic s", "step s", "limit")
    table = make_table(["parameters"], numbers)
    for each in result.predictions:
        table.add_row(
            f"{each.layout}: {each.state_nbytes / gb:,.4g} GB",
            f"{each.budget_nbytes / gb:,.4g}" if each.budget_nbytes else "small",
            f"{each.moved_nbytes / gb:,.4g}",
            f"{each.io_seconds:.3g}",
            f"{each.arithmetic_seconds:.3g}",
            f"{each.step_seconds:.3g}",
            each.limit,
        )
    show(console, table)
    say(
        console,
        "GB: 10^9 bytes. small: a budget that is small beside the state. A step takes the longer of I/O and "
        "arithmetic.",
    )
    state_nbytes = max(each.state_nbytes for each in result.predictions)
    if state_nbytes > result.free_nbytes:
        free = f"{result.free_nbytes / gb:,.4g} GB free, less than the largest of these states"
        say(console, f"note: {job.folder} has {free}")
