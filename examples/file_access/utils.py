"""What the programs share: DeepNVMe's command lines, the clock, the check, and ends that leave nothing behind.

The rules are the same for every program:

* a load finds nothing in the page cache: the file's pages are dropped before each repetition;
* a store writes a new file each time, the old one is removed before the clock runs, and ends with its bytes on the
  drive (``fsync``), unless ``--no_sync`` is given: plain Python then only fills the page cache;
* the figure is the median of the repetitions; GB are 10**9 bytes, the sizes of ``--mb_size`` are 2**20.
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

FAILED = 1  # of the machine, or of the check
MISSING = 3  # what the program needs is not here: a GPU, GPUDirect Storage, DeepSpeed
INTERRUPTED = 130

_CHUNK_NBYTES = 8 << 20


class MissingError(Exception):
    """What a program needs is not here."""


# --- command lines ---


def load_options(description: str | None) -> argparse.Namespace:
    """Parse a load program's command line; ``nbytes`` is the input file's size."""
    parser = _parser(description)
    parser.add_argument("--input_file", required=True, help="file to read, on the drive to try")
    options = parser.parse_args()
    problems = _loop_problems(options)
    file = Path(options.input_file)
    if not file.is_file():
        problems.append(f"--input_file: {file} is no file")
    elif file.stat().st_size == 0:
        problems.append(f"--input_file: {file} is empty")
    elif not os.access(file, os.R_OK):
        problems.append(f"--input_file: {file} cannot be read by this user")
    if problems:
        parser.error("; ".join(problems))
    options.nbytes = file.stat().st_size
    return options


def store_options(description: str | None) -> argparse.Namespace:
    """Parse a store program's command line; ``nbytes`` is the size of the tensor to store."""
    parser = _parser(description)
    parser.add_argument(
        "--nvme_folder", required=True, help="folder to write to, on the drive to try"
    )
    parser.add_argument(
        "--mb_size", type=int, default=1024, help="size of the tensor in MB of 2**20 (default 1024)"
    )
    parser.add_argument(
        "--no_sync",
        action="store_true",
        help="leave out the fsync at the end of each store: plain Python's data is then still in memory",
    )
    options = parser.parse_args()
    problems = _loop_problems(options)
    if options.mb_size < 1:
        problems.append(f"--mb_size: {options.mb_size} is less than 1")
    folder = Path(options.nvme_folder)
    if not folder.is_dir():
        problems.append(f"--nvme_folder: {folder} is no folder")
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
        "--validate", action="store_true", help="compare tensor and file, read by plain Python"
    )
    return parser


def _loop_problems(options: argparse.Namespace) -> list[str]:
    return [] if options.loop >= 1 else [f"--loop: {options.loop} is less than 1"]


# --- the clock and the check ---


def measure_load(
    name: str, options: argparse.Namespace, load: Callable[[str], torch.Tensor]
) -> None:
    """Load the input file ``--loop`` times, print what a load takes, and check the last one if asked."""
    seconds = []
    for _ in range(options.loop):
        tensor = None  # a program that makes a new tensor each time must not hold two
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
    """Store a tensor ``--loop`` times, print what a store takes, and check the last one if asked."""
    seconds: list[float] = []
    with _scratch_folder(options.nvme_folder) as folder:
        path = str(folder / "tensor.bin")
        for _ in range(options.loop):
            Path(path).unlink(missing_ok=True)
            make_durable(str(folder))  # the file system is through with the old file
            with _clock(seconds):
                store(path, tensor)
                if not options.no_sync:
                    make_durable(path)
        _print_speed(name, options.nbytes, seconds)
        if options.validate:
            _check(path, tensor)


def random_tensor(nbytes: int) -> torch.Tensor:
    """Return bytes to store; ``nbytes`` is a multiple of 8."""
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's word for a lack of memory
        raise OSError(f"no memory for a tensor of {nbytes} bytes") from error
    tensor.view(torch.int64).random_()  # eight at a time
    return tensor


def file_holds(path: str, tensor: torch.Tensor) -> bool:
    """Return whether a file holds just the bytes of a tensor, read by plain Python."""
    expected = tensor.cpu().view(torch.uint8).numpy().data
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, len(expected), _CHUNK_NBYTES):
            part = expected[begin : begin + _CHUNK_NBYTES]
            if os.pread(file.fileno(), len(part), begin) != part:
                return False
    return Path(path).stat().st_size == len(expected)


def drop_from_page_cache(path: str) -> None:
    """Have the next read come from the drive; only clean pages can be dropped, hence the sync."""
    make_durable(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def make_durable(path: str) -> None:
    """Return when a file's data, or a folder's entries, would survive a power cut."""
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


# --- what only some machines have ---


def require_deepspeed() -> Any:
    """Return DeepSpeed's own async_io op, compiled at first use, or raise MissingError."""
    # its compilation looks for ninja on PATH, where an environment that is not activated has none
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)
    except ImportError as error:
        raise MissingError(f"no DeepSpeed: {error} (remedy: benchmarks/README.md)") from error
    except Exception as error:
        raise MissingError(f"DeepSpeed's async_io does not build: {error}") from error


def require_gpu() -> None:
    """Raise MissingError, with what is missing, where torch can use no GPU."""
    if torch.version.cuda is None:
        raise MissingError(
            f"no GPU: torch {torch.__version__} is built without CUDA (remedy: install a CUDA build of torch)"
        )
    if not torch.cuda.is_available():
        raise MissingError(
            f"no GPU: torch {torch.__version__} finds no CUDA device (remedy: see whether nvidia-smi lists one, and "
            "whether CUDA_VISIBLE_DEVICES hides it)"
        )


def require_gds() -> tensorferry.gds_handle:
    """Return a handle for GPUDirect Storage, or raise MissingError, with what is missing, where there is none."""
    require_gpu()
    try:
        handle = tensorferry.gds_handle()
    except tensorferry.EngineUnavailableError as refusal:
        raise MissingError(str(refusal)) from refusal
    if handle.stats()["compat"]:
        print(f"note: through host memory: {handle.engine_refusals['cufile']}", file=sys.stderr)
    return handle


# --- how programs end ---


def run(main: Callable[[], None]) -> None:
    """Run a program; say what stopped it in one line, with an exit code that tells the kind (README.md)."""

    def end_like_ctrl_c(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end_like_ctrl_c)
    try:
        main()
    except MissingError as missing:
        _leave(missing, MISSING)
    except (OSError, tensorferry.EngineUnavailableError, torch.OutOfMemoryError) as error:
        _leave(error, FAILED)
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)


def _leave(reason: object, code: int) -> None:
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    sys.exit(code)
