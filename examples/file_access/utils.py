"""Shared code of the programs: DeepNVMe's command lines, the measurement, the validation, and the exit codes.

The rules are the same for all programs:

* A load is cold: the file is dropped from the page cache before each repetition.
* A store writes a new file each time, and the old file is removed before the measured time. The store ends with
  ``fsync``, unless ``--no_sync`` is given. With ``--no_sync``, plain Python only fills the page cache.
* The figure is the median of the repetitions. A GB is 10**9 bytes. The unit of ``--mb_size`` is 2**20 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tensorferry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

FAILED = 1  # an error of the machine, or a failed validation
MISSING = 3  # a requirement is missing: a GPU, GPUDirect Storage, or DeepSpeed
INTERRUPTED = 130

_CHUNK_NBYTES = 8 << 20


class MissingError(Exception):
    """A requirement of a program is missing."""


# --- command lines ---


def load_options(description: str | None) -> argparse.Namespace:
    """Parse the command line of a load program, and add ``nbytes``, the size of the input file."""
    parser = _parser(description)
    parser.add_argument("--input_file", required=True, help="the file to read, on the drive")
    options = parser.parse_args()
    problems = _loop_problems(options)
    file = Path(options.input_file)
    if not file.is_file():
        problems.append(f"--input_file: {file} is not a file")
    elif file.stat().st_size == 0:
        problems.append(f"--input_file: {file} is empty")
    elif not os.access(file, os.R_OK):
        problems.append(f"--input_file: {file} cannot be read by this user")
    if problems:
        parser.error("; ".join(problems))
    options.nbytes = file.stat().st_size
    return options


def store_options(description: str | None) -> argparse.Namespace:
    """Parse the command line of a store program, and add ``nbytes``, the size of the tensor."""
    parser = _parser(description)
    parser.add_argument("--nvme_folder", required=True, help="the folder to write to, on the drive")
    parser.add_argument(
        "--mb_size", type=int, default=1024, help="size of the tensor in MB of 2**20 (default 1024)"
    )
    parser.add_argument(
        "--no_sync",
        action="store_true",
        help="do not end stores with fsync; the data of plain Python is then still in memory",
    )
    options = parser.parse_args()
    problems = _loop_problems(options)
    if options.mb_size < 1:
        problems.append(f"--mb_size: {options.mb_size} is less than 1")
    folder = Path(options.nvme_folder)
    if not folder.is_dir():
        problems.append(f"--nvme_folder: {folder} is not a folder")
    elif not os.access(folder, os.W_OK | os.X_OK):
        problems.append(f"--nvme_folder: {folder} cannot be written to by this user")
    if problems:
        parser.error("; ".join(problems))
    options.nbytes = options.mb_size << 20
    return options


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--loop", type=int, default=3, help="repetitions (default 3)")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="compare the tensor with the file, which plain Python reads",
    )
    return parser


def _loop_problems(options: argparse.Namespace) -> list[str]:
    return [] if options.loop >= 1 else [f"--loop: {options.loop} is less than 1"]


# --- measurement and validation ---


def measure_load(
    name: str, options: argparse.Namespace, load: Callable[[str], torch.Tensor]
) -> None:
    """Load the input file ``--loop`` times, print the median time, and with ``--validate`` check the last load."""
    seconds = []
    for _ in range(options.loop):
        tensor = None  # a program that allocates a new tensor each time must not hold two of them
        drop_from_page_cache(options.input_file)
        with _clock(seconds):
            tensor = load(options.input_file)
    _print_speed(name, options.nbytes, seconds)
    if options.validate:
        assert tensor is not None
        _check(options.input_file, tensor)


def measure_store(
    name: str,
    options: argparse.Namespace,
    tensor: torch.Tensor,
    store: Callable[[str, torch.Tensor], None],
) -> None:
    """Store a tensor ``--loop`` times, print the median time, and with ``--validate`` check the last store."""
    seconds: list[float] = []
    with _scratch_folder(options.nvme_folder) as folder:
        path = str(folder / "tensor.bin")
        for _ in range(options.loop):
            Path(path).unlink(missing_ok=True)
            # Complete the removal of the old file before the measured time.
            make_durable(str(folder))
            with _clock(seconds):
                store(path, tensor)
                if not options.no_sync:
                    make_durable(path)
        _print_speed(name, options.nbytes, seconds)
        if options.validate:
            _check(path, tensor)


def random_tensor(nbytes: int) -> torch.Tensor:
    """Return a tensor of random bytes. ``nbytes`` must be a multiple of 8."""
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # raised by torch if the memory cannot be allocated
        raise OSError(f"cannot allocate a tensor of {nbytes} bytes") from error
    tensor.view(torch.int64).random_()  # generating 8 bytes at a time is faster
    return tensor


def file_holds(path: str, tensor: torch.Tensor) -> bool:
    """Return whether the content of a file, read with plain Python, equals the bytes of a tensor."""
    expected = tensor.cpu().view(torch.uint8).numpy().data
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, len(expected), _CHUNK_NBYTES):
            part = expected[begin : begin + _CHUNK_NBYTES]
            if os.pread(file.fileno(), len(part), begin) != part:
                return False
    return Path(path).stat().st_size == len(expected)


def drop_from_page_cache(path: str) -> None:
    """Drop a file from the page cache. The sync comes first, because only clean pages can be dropped."""
    make_durable(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def make_durable(path: str) -> None:
    """Make the data of a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _clock(seconds: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)


def _print_speed(name: str, nbytes: int, seconds: list[float]) -> None:
    taken = statistics.median(seconds)
    gb = nbytes / 1e9
    print(f"{name}: {gb:.3f} GB, {taken:.4f} secs, {gb / taken:5.2f} GB/sec", flush=True)


def _check(path: str, tensor: torch.Tensor) -> None:
    same = file_holds(path, tensor)
    print(f"Validation success = {same}", flush=True)
    if not same:
        raise SystemExit(FAILED)


@contextlib.contextmanager
def _scratch_folder(parent: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tensorferry-example-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- optional requirements ---


def require_deepspeed() -> Any:
    """Return DeepSpeed's own async_io op, which is compiled at its first use, or raise MissingError."""
    # The compilation needs ninja on PATH, where it is missing if the virtual environment is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)
    except ImportError as error:
        raise MissingError(f"no DeepSpeed: {error} (remedy: benchmarks/README.md)") from error
    except Exception as error:
        raise MissingError(f"DeepSpeed's async_io does not build: {error}") from error


def require_gpu() -> None:
    """Raise MissingError with the reason if torch cannot use a GPU."""
    if torch.version.cuda is None:
        raise MissingError(
            f"no GPU: torch {torch.__version__} is built without CUDA (remedy: install a CUDA build of torch)"
        )
    if not torch.cuda.is_available():
        raise MissingError(
            f"no GPU: torch {torch.__version__} does not find a CUDA device (remedy: check whether nvidia-smi lists "
            "one, and whether CUDA_VISIBLE_DEVICES hides it)"
        )


def require_gds() -> tensorferry.gds_handle:
    """Return a handle for GPUDirect Storage, or raise MissingError with the reason."""
    require_gpu()
    try:
        handle = tensorferry.gds_handle()
    except tensorferry.EngineUnavailableError as refusal:
        raise MissingError(str(refusal)) from refusal
    if handle.stats()["compat"]:
        reason = handle.engine_refusals["cufile"]
        print(f"note: transfers pass through host memory: {reason}", file=sys.stderr)
    return handle


# --- the end of programs ---


def run(main: Callable[[], None]) -> None:
    """Run a program. Print an error in one line, and exit with a code that depends on its kind (README.md)."""

    def end_like_ctrl_c(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end_like_ctrl_c)
    try:
        main()
    except MissingError as missing:
        _exit_with(missing, MISSING)
    except (OSError, tensorferry.EngineUnavailableError, torch.OutOfMemoryError) as error:
        _exit_with(error, FAILED)
    except KeyboardInterrupt:
        _exit_with("interrupted", INTERRUPTED)


def _exit_with(reason: object, code: int) -> None:
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    sys.exit(code)
