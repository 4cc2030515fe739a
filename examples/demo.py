"""Store tensors in files and load them again: plain Python, a handle, and tensorferry's functions.

Run it without arguments: ``python examples/demo.py`` (or ``make demo``). It stores and loads one
large tensor and many small ones, checks every byte, and prints the cost of each method. The rules
are the same for all methods:

* A write creates new files. It ends when their data and size are durable (``fsync``, or
  ``sync=True``).
* A read is cold: the files are dropped from the page cache before it, which does not need root.
* All memory is touched before the measured time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tensorferry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

ROUNDS = 3  # the figures are medians of the rounds
ODD_NBYTES = (1, 511, 4_096, 4_097, 30_011, 65_536, 100_003, 262_147)  # sizes of the small tensors


# --- the methods: each stores tensors in files, and loads the files into existing tensors ---


class PlainPython:
    """The usual method: write() and readinto() through the page cache."""

    name = "plain Python"

    def store(self, paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
        for path, tensor in zip(paths, tensors, strict=True):
            with open(path, "wb", buffering=0) as file:
                rest = tensor.numpy().data
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())

    def load(self, paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
        for path, tensor in zip(paths, tensors, strict=True):
            with open(path, "rb", buffering=0) as file:
                rest = tensor.numpy().data
                while rest:
                    rest = rest[file.readinto(rest) :]


class Handle:
    """DeepNVMe's API: submit several requests, and wait for all of them."""

    name = "tensorferry.aio_handle"

    def __init__(self) -> None:
        self.handle = tensorferry.aio_handle()

    def store(self, paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
        for path, tensor in zip(paths, tensors, strict=True):
            self.handle.async_pwrite(tensor, path)
        self.handle.wait()
        for path in paths:  # a handle does not sync its writes: they are durable only after fsync
            make_durable(path)

    def load(self, paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
        for path, tensor in zip(paths, tensors, strict=True):
            self.handle.async_pread(tensor, path)
        self.handle.wait()


class Functions:
    """tensorferry's own functions, with ordinary torch memory."""

    name = "tensorferry.write/read"

    def store(self, paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
        if len(paths) == 1:
            tensorferry.write(paths[0], tensors[0], sync=True)
        else:
            tensorferry.write_many(list(zip(paths, tensors, strict=True)), sync=True)

    def load(self, paths: Sequence[Path], tensors: Sequence[torch.Tensor]) -> None:
        if len(paths) == 1:
            tensorferry.read(paths[0], tensors[0])
        else:
            tensorferry.read_many(list(zip(paths, tensors, strict=True)))


# --- measurements ---


@dataclass
class Row:
    """The figures of one method for one kind of work."""

    way: str
    verb: str
    tensors: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_nbytes: int = 0

    @property
    def work(self) -> str:
        return f"{self.verb} {self.tensors}"

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / statistics.median(self.seconds)


def measure(row: Row, work: Callable[[], None]) -> None:
    """Run ``work``, and add its cost to a row."""
    resident = reset_peak_memory()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    work()
    row.seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF)
    row.cpu_seconds.append(after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime)
    row.peak_nbytes = max(row.peak_nbytes, peak_memory() - resident)


def reset_peak_memory() -> int:
    """Reset the process's peak memory to the current memory, and return this size."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


# --- files ---


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Yield a new directory, and remove it afterwards, also after Ctrl-C."""
    directory = Path(tempfile.mkdtemp(prefix="tensorferry-demo-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# --- the demonstration ---


def store_and_load(
    way: Any,
    directory: Path,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    stored: Row,
    loaded: Row,
) -> None:
    """Store tensors, load them cold, check every byte, and add both times to the rows."""
    home = Path(tempfile.mkdtemp(dir=directory))
    paths = [home / f"tensor{number}.bin" for number in range(len(sources))]
    for target in targets:
        target.zero_()
    measure(stored, lambda: way.store(paths, sources))
    drop_from_page_cache(paths)
    measure(loaded, lambda: way.load(paths, targets))
    for path, source, target in zip(paths, sources, targets, strict=True):
        if path.stat().st_size != source.nbytes or not torch.equal(source, target):
            raise SystemExit(f"{way.name}: the data of {path} differ")
    if len(paths) == 1:
        paths[0].unlink()
        make_durable(home)  # complete the removal before the next measurement
    # Many small files stay until the end: creating files is slow on ext4 after many were removed.


def large_tensors(
    nbytes: int, make: Callable[[], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a tensor to store, and one to load into."""
    source, target = make(), make()
    words = source[: nbytes // 8 * 8].view(torch.int64)  # generating 8 bytes at a time is faster
    words.random_(generator=torch.Generator().manual_seed(0))
    source[nbytes // 8 * 8 :] = 7
    return [source], [target]


def small_tensors(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return tensors of odd sizes to store, and others to load into."""
    sizes = list(itertools.islice(itertools.cycle(ODD_NBYTES), count))
    generator = torch.Generator().manual_seed(1)
    sources = [torch.empty(n, dtype=torch.uint8).random_(generator=generator) for n in sizes]
    return sources, [torch.zeros_like(source) for source in sources]


def run_to_its_end(command: list[str]) -> tuple[int, str]:
    """Run a program. If this call is interrupted, kill the program and wait for its end.

    subprocess.run() does not wait in that case, and the program would still be writing.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        try:
            output, _ = program.communicate()
        except BaseException:
            program.kill()
            program.wait()
            raise
        return program.returncode, output


def fio_gb_per_second(directory: Path, nbytes: int) -> dict[str, float]:
    """Run fio with a file of the same size: io_uring, 1 MiB blocks, registered buffers, O_DIRECT."""
    found = {}
    path = directory / "fio.bin"
    for kind, work in (("write", "store large"), ("read", "load large")):
        command = (
            f"fio --name=demo --filename={path} --size={nbytes} --rw={kind} --ioengine=io_uring"
            " --bs=1M --iodepth=32 --fixedbufs --registerfiles --direct=1 --fallocate=native"
            " --end_fsync=1 --output-format=json --thread"
        )
        returncode, output = run_to_its_end(command.split())
        if returncode == 0:
            report = json.loads(output[output.index("{") :])["jobs"][0][kind]
            found[work] = report["io_bytes"] / 1e9 / (max(1, report["runtime"]) / 1000)
    path.unlink(missing_ok=True)
    return found


def run(directory: Path, nbytes: int, small_count: int, console: Console) -> dict[str, Any]:
    """Run all methods alternately on both kinds of tensors, and return the figures for the table."""
    python, handle, functions = PlainPython(), Handle(), Functions()
    ways: list[Any] = [python, handle, functions]
    fio: list[dict[str, float]] = []
    rows: dict[str, Row] = {}
    progress = Progress(
        BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )
    steps = 2 + ROUNDS * (2 * len(ways) + 1)
    with progress, scratch_directory(directory) as scratch:
        task = progress.add_task("making a large tensor", total=steps)
        example = torch.empty(0, dtype=torch.uint8)
        ordinary = large_tensors(nbytes, lambda: torch.zeros(nbytes, dtype=torch.uint8))
        # The handle's own memory is page-aligned and locked, so transfers do not need a copy.
        locked = large_tensors(nbytes, lambda: handle.handle.new_cpu_locked_tensor(nbytes, example))
        large = {python: ordinary, handle: locked, functions: ordinary}

        progress.update(task, advance=1, description="making small tensors")
        small = dict.fromkeys(ways, small_tensors(small_count))
        progress.advance(task)

        for work, tensors in (("large", large), ("small", small)):
            for _ in range(ROUNDS):
                if work == "large" and shutil.which("fio"):
                    progress.update(task, advance=1, description="large: fio")
                    fio.append(fio_gb_per_second(scratch, nbytes))
                for way in ways:
                    progress.update(task, advance=1, description=f"{work}: {way.name}")
                    sources, targets = tensors[way]
                    moved = sum(source.nbytes for source in sources)
                    pair = [
                        rows.setdefault(
                            f"{verb} {work} {way.name}", Row(way.name, verb, work, moved)
                        )
                        for verb in ("store", "load")
                    ]
                    store_and_load(way, scratch, sources, targets, *pair)
        progress.update(task, completed=steps, description="every byte checked")
    return {
        "rows": list(rows.values()),
        "fio": {
            work: statistics.median(run[work] for run in fio)
            for work in ("store large", "load large")
            if fio and all(work in run for run in fio)
        },
    }


def print_table(console: Console, result: dict[str, Any], nbytes: int, small_count: int) -> None:
    table = Table(
        title=f"One tensor of {nbytes / 1e9:.2f} GB and {small_count:,} small ones: fresh files, "
        "writes durable (fsync), reads cold",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("work")
    table.add_column("way")
    for heading in ("GB/s", "of Python", "of fio", "CPU s", "peak memory"):
        table.add_column(heading, justify="right")
    rows: list[Row] = result["rows"]
    for work in dict.fromkeys(row.work for row in rows):
        group = [row for row in rows if row.work == work]
        for row in group:
            fio = result["fio"].get(work)
            table.add_row(
                work if row is group[0] else "",
                row.way,
                f"{row.gb_per_second:.2f}",
                f"{row.gb_per_second / group[0].gb_per_second:.2f}",
                f"{row.gb_per_second / fio:.2f}" if fio else no_fio(work),
                f"{statistics.median(row.cpu_seconds):.2f}",
                f"+{row.peak_nbytes / (1 << 20):.0f} MiB",
                end_section=row is group[-1],
            )
    console.print(table)
    console.print(
        "Medians of alternating rounds. The handle's large tensors are page-locked, all others are "
        "in ordinary torch memory. fio: io_uring, 1 MiB blocks, depth 32, registered buffers."
    )
    console.print("Every byte was checked.")


def no_fio(work: str) -> str:
    return "not run" if shutil.which("fio") and work.endswith("small") else "no fio"


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "fio_gb_per_second": result["fio"],
        "rows": [
            {
                "work": row.work,
                "way": row.way,
                "nbytes": row.nbytes,
                "gb_per_second": row.gb_per_second,
                "seconds": row.seconds,
                "cpu_seconds": row.cpu_seconds,
                "peak_memory_growth_nbytes": row.peak_nbytes,
            }
            for row in result["rows"]
        ],
    }


def end_like_ctrl_c(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a folder on the drive")
    parser.add_argument(
        "--nbytes", type=int, default=1_000_000_000, help="size of the large tensor"
    )
    parser.add_argument("--small-count", type=int, default=1_000, help="number of small tensors")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not options.directory.is_dir():
        parser.error(f"--directory: {options.directory} is not a directory")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_like_ctrl_c)
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        result = run(options.directory, options.nbytes, options.small_count, console)
    except KeyboardInterrupt:
        console.print("Interrupted; the demonstration's files are removed.")
        return 130
    print_table(console, result, options.nbytes, options.small_count)
    if options.json:
        options.json.write_text(json.dumps(as_json(result), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
