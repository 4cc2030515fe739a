"""``tensorferry bench``: what its options are called, and how results are shown."""

from __future__ import annotations

import contextlib
from pathlib import Path  # noqa: TC003 (typer looks at the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from tensorferry.cli.consoles import make_console
from tensorferry.cli.leaving import leaving_well
from tensorferry.tuning.bench.arguments import ENGINES, MEMORIES, Arguments, make_job
from tensorferry.tuning.bench.run import Progress as Listener
from tensorferry.tuning.bench.run import run
from tensorferry.tuning.sizes import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.tuning.bench.arguments import Job
    from tensorferry.tuning.bench.results import Results, Summary


_WHAT, _HOW, _OUT, _GPU = "What moves", "How it moves", "Results", "GPU"


def bench(
    path: Annotated[
        str | None, typer.Argument(help="The folder to work in; the same as --folder.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(help="The folder to work in.", rich_help_panel=_WHAT)
    ] = None,
    folder_to_device_mapping: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER:DEVICE",
            help="A folder and the number of a GPU, which counts only with --gpu. One process for each; repeat it.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    io_size: Annotated[
        str,
        typer.Option(
            metavar="BYTES", help="Bytes of each file, such as 400M.", rich_help_panel=_WHAT
        ),
    ] = "1G",
    read: Annotated[bool, typer.Option("--read", help="Only read.", rich_help_panel=_WHAT)] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Only write.", rich_help_panel=_WHAT)
    ] = False,
    multi_process: Annotated[
        str,
        typer.Option(
            metavar="N", help="Processes, each with a file of its own.", rich_help_panel=_WHAT
        ),
    ] = "1",
    loops: Annotated[
        str, typer.Option(metavar="N", help="Transfers that count.", rich_help_panel=_WHAT)
    ] = "3",
    warmup_loops: Annotated[
        str, typer.Option(metavar="N", help="Transfers before them.", rich_help_panel=_WHAT)
    ] = "1",
    include_warmup_time: Annotated[
        bool,
        typer.Option("--include-warmup-time", help="Count those too.", rich_help_panel=_WHAT),
    ] = False,
    different_file_each_iteration: Annotated[
        bool,
        typer.Option(
            "--different-file-each-iteration",
            help="A file for each loop; else writes overwrite the one of the first loop.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Compare file and memory after each transfer, outside the clock.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    keep_files: Annotated[
        bool,
        typer.Option(
            "--keep-files",
            help="Use ds_io's file names, read files that are there already, and leave all for the next run.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="|".join(ENGINES),
            help="aio_handle: asynchronous calls and wait(); aio_basic: one call with a handle of its own; torch_io: "
            "torch.save and load; torch_fastio: torch.save through a handle; files: tensorferry.open().",
            rich_help_panel=_HOW,
        ),
    ] = "aio_handle",
    io_engine: Annotated[
        str | None,
        typer.Option(
            metavar="io_uring|libaio|threads",
            help="How blocks reach the kernel. Default: the first that works.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes of one submission. Default of this and the next: what a handle without settings has.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    queue_depth: Annotated[
        str | None,
        typer.Option(metavar="N", help="Blocks in flight at most.", rich_help_panel=_HOW),
    ] = None,
    io_parallel: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Threads that each have such a queue.", rich_help_panel=_HOW
        ),
    ] = None,
    single_submit: Annotated[
        bool,
        typer.Option("--single-submit", help="A system call for each block.", rich_help_panel=_HOW),
    ] = False,
    sequential_requests: Annotated[
        bool,
        typer.Option(
            "--sequential-requests",
            help="Accepted; queues are always refilled as blocks complete.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(MEMORIES),
            help="Host memory. locked: as tensorferry.empty() makes it, the default; ordinary: unaligned, on small "
            "pages; accelerator: pinned by torch. With --gpu: copy all bytes by way of such memory, rather than give "
            "the CUDA tensor to the handle.",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None,
    use_accelerator_pin_memory: Annotated[
        bool,
        typer.Option(
            "--use-accelerator-pin-memory",
            help="The same as --memory accelerator.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    fast_io_size: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Bytes of small pieces that torch_fastio gathers.",
            rich_help_panel=_HOW,
        ),
    ] = "64M",
    torch_legacy_save: Annotated[
        bool,
        typer.Option(
            "--torch-legacy-save", help="torch.save's format before 1.6.", rich_help_panel=_HOW
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Move CUDA tensors, as they are unless --memory.", rich_help_panel=_GPU
        ),
    ] = False,
    use_gds: Annotated[
        bool,
        typer.Option(
            "--use-gds",
            help="Use gds_handle (GPUDirect Storage, by cuFile) instead of aio_handle.",
            rich_help_panel=_GPU,
        ),
    ] = False,
    slow_bounce_buffer: Annotated[
        bool,
        typer.Option(
            "--slow-bounce-buffer",
            help="As --memory, and make that memory anew for each transfer.",
            rich_help_panel=_GPU,
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Measure plain Python and fio too, in turns, with the same sizes and settings.",
            rich_help_panel=_OUT,
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all of it, each loop included.", rich_help_panel=_OUT
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table.", rich_help_panel=_OUT),
    ] = None,
) -> None:
    """Measure how fast files are written and read.

    Reads are cold: the file is dropped from the page cache before each. Takes all options of DeepSpeed's ds_io.
    """
    with leaving_well("tensorferry bench"):
        job = make_job(
            Arguments(
                folder=folder,
                also_folder=path,
                folder_to_device_mapping=folder_to_device_mapping or [],
                io_size=io_size,
                read=read,
                write=write,
                multi_process=multi_process,
                engine=engine,
                io_engine=io_engine,
                block_size=block_size,
                queue_depth=queue_depth,
                io_parallel=io_parallel,
                single_submit=single_submit,
                sequential_requests=sequential_requests,
                loops=loops,
                warmup_loops=warmup_loops,
                include_warmup_time=include_warmup_time,
                different_file_each_iteration=different_file_each_iteration,
                validate=validate,
                memory="accelerator" if use_accelerator_pin_memory else memory,
                gpu=gpu,
                use_gds=use_gds,
                slow_bounce_buffer=slow_bounce_buffer,
                fast_io_size=fast_io_size,
                torch_legacy_save=torch_legacy_save,
                compare=compare,
                keep_files=keep_files,
                outputs={"--json": json, "--csv": csv},
            )
        )
        with _progress_bar() as listener:
            results = run(job, listener)
        show(results, make_console())
        if json is not None:
            results.write_json(json)
        if csv is not None:
            results.write_csv(csv)


def show(results: Results, console: Console) -> None:
    """Print what was measured."""
    job = results.job
    console.print(
        f"{len(job.places)} x {format_nbytes(job.io_nbytes)} in "
        + ", ".join(dict.fromkeys(str(place.folder) for place in job.places))
        + f", {job.loops} loops after {job.warmup_loops} to warm up, {_memory_in_words(job)}"
    )
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="GB: 10^9 bytes. p50, p99: of one block. +MiB: memory besides the buffer. Reads are cold.",
    )
    table.add_column("", no_wrap=True)
    for name in ("GB/s", "min .. max", "total", "p50 ms", "p99 ms", "CPU s/GB", "+MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results.results:
        name = f"{result.operation} {result.way}"
        if len(result.processes) > 1:
            for process in result.processes:
                row = f"{name} {process.process}"
                table.add_row(row, *_cells(result.summary(process)), style="dim")
        table.add_row(name, *_cells(result.summary()), end_section=True)
    console.print(table)
    for result in results.results:
        for settings in dict.fromkeys(
            _in_words(p.settings) for p in result.processes if p.settings
        ):
            console.print(
                f"{result.operation} {result.way}: {settings}", highlight=False, soft_wrap=True
            )
    for result in results.results:
        if result.gpu is not None:
            console.print(
                f"{result.operation} {result.way}: {_gpu_in_words(result.gpu)}",
                highlight=False,
                soft_wrap=True,
            )
    for note in results.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


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


@contextlib.contextmanager
def _progress_bar() -> Iterator[Listener | None]:
    """Show a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)

        def listen(description: str, done: int, total: int) -> None:
            bar.update(task, description=description, completed=done, total=total)

        yield listen
