"""The job of a measurement, declared once: each field with its unit, limits and help, and its default in each command.

``bench``, ``tune``, ``tensorferry-ds-io`` and ``tensorferry-ds-nvme-tune`` get their options from this table. An option
has the name of its field, also with underscores, as in DeepSpeed's tools. ``tuner_name`` is its name in DeepSpeed's
ds_nvme_tune, and in ``tune``, if that is another.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.parsing import FOLDER, MAX_FILE_NBYTES, parse_size
from tensorferry.transfer.settings import MAX_BLOCK_NBYTES, MAX_PARALLELISM, MAX_QUEUE_DEPTH
from tensorferry.tuning.tune import QUICK_SECONDS, SECONDS, SMALLEST_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_ABSENT: Any = object()  # the default of a field in a command that does not have it
_TYPES: dict[str, Any] = {"": bool, "BYTES": int, "N": int, "SECONDS": float, "FOLDER:DEVICE": str}
_TUNERS = ("tune", "ds_nvme_tune")
_make_enum: Any = Enum  # mypy accepts only calls with constants


@dataclass(frozen=True)
class Field:
    """One field of a job.

    ``unit`` is what help shows as the kind of its value: BYTES, N, SECONDS, FOLDER, PATH, or a choice of words such as
    "read|write". Without one, the option is a switch. The fields named like commands are the defaults there. A field
    with a list as its default can be repeated; with an ellipsis, it must be given.
    """

    name: str
    help: str
    unit: str = ""
    limits: tuple[float, float] | None = None
    bench: Any = _ABSENT
    ds_io: Any = _ABSENT
    tune: Any = _ABSENT
    ds_nvme_tune: Any = _ABSENT
    tuner_name: str = ""
    positional: tuple[str, ...] = ()
    tuner_minimum: int = 1

    def parameter(self, command: str) -> inspect.Parameter | None:
        """Return the parameter of a command's function for this field, or None."""
        default = getattr(self, command)
        if default is _ABSENT:
            return None
        kind: Any = _TYPES.get(self.unit, Path)
        options: dict[str, Any] = {"help": self.help}
        if self.unit:
            options["metavar"] = self.unit
        if "|" in self.unit:
            kind = _make_enum(self.name, {word: word for word in self.unit.split("|")}, type=str)
        elif self.unit == "FOLDER":
            options |= FOLDER
        elif self.unit == "BYTES":
            low = self.tuner_minimum if command in _TUNERS else 1
            options["parser"] = parse_size(
                low, int(self.limits[1] if self.limits else MAX_FILE_NBYTES)
            )
            options["show_default"] = format_nbytes(default) if isinstance(default, int) else False
        elif self.limits:
            options |= {"min": self.limits[0], "max": self.limits[1]}
        if isinstance(default, list) or (default is ... and self.tune == []):
            kind = list[kind]
        elif default is None:
            kind = kind | None
        if command in self.positional:
            option = typer.Argument(default, **options)
        else:
            name = self.tuner_name if self.tuner_name and command in _TUNERS else self.name
            option = typer.Option(default, f"--{name.replace('_', '-')}", **options)
        only = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, only, default=option, annotation=kind)


_NOTHING = "Accepted, without effect."
FIELDS = (
    Field("path", "The folder; the same as --folder.", "FOLDER", bench=None, positional=("bench",)),
    Field("folder", "The folder to work in.", "FOLDER", bench=None, ds_io=None),
    Field(
        "folders",
        "The folders on the drives to tune, one after the other.",
        "FOLDER",
        tune=[],
        ds_nvme_tune=...,
        tuner_name="nvme_dir",
        positional=("tune",),
    ),
    Field(
        "folder_to_device_mapping",
        "A folder and the number of a GPU, which is used only with --gpu. Repeat the option; each gets one process.",
        "FOLDER:DEVICE",
        bench=[],
        ds_io=[],
    ),
    Field(
        "io_size",
        "The size of each file, such as 400M. By default, tune uses what the drive moves in 0.02 s, from 64M to 1G.",
        "BYTES",
        bench=1 << 30,
        ds_io=...,
        tune=None,
        ds_nvme_tune=400 << 20,
        tuner_minimum=SMALLEST_NBYTES,
    ),
    Field("read", "Only read.", bench=False, ds_io=False),
    Field("write", "Only write.", bench=False),
    Field("no_read", "Do not tune reads.", tune=False, ds_nvme_tune=False),
    Field("no_write", "Do not tune writes.", tune=False, ds_nvme_tune=False),
    Field(
        "multi_process",
        "The number of processes, each with a separate file.",
        "N",
        (1, 1024),
        bench=1,
        ds_io=1,
    ),
    Field(
        "loops",
        "The number of measured transfers. Without effect in ds-nvme-tune.",
        "N",
        (1, 1_000_000),
        bench=3,
        ds_io=3,
        ds_nvme_tune=1,
    ),
    Field(
        "warmup_loops",
        "The number of transfers before the measured ones, which are not counted.",
        "N",
        (0, 1_000_000),
        bench=1,
        ds_io=1,
    ),
    Field(
        "include_warmup_time",
        "Also count the transfers of --warmup-loops.",
        bench=False,
        ds_io=False,
    ),
    Field(
        "different_file_each_iteration",
        "Use a new file for each loop. By default, writes overwrite the file of the first loop.",
        bench=False,
        ds_io=False,
    ),
    Field(
        "validate",
        "Compare file and memory after each transfer, outside the measured time.",
        bench=False,
        ds_io=False,
    ),
    Field(
        "keep_files",
        "Use ds_io's file names, read existing files, and keep all files for the next run.",
        bench=False,
    ),
    Field(
        "engine",
        "Asynchronous calls and wait(), tensorferry.open(), or torch.save and torch.load.",
        "aio_handle|files|torch_io",
        bench="aio_handle",
        ds_io="aio_handle",
    ),
    Field(
        "io_engine",
        "The I/O engine. Default: the first that works.",
        "io_uring|libaio|threads",
        bench=None,
    ),
    Field(
        "block_size",
        "The size of one block. In bench, without --block-size, --queue-depth and --io-parallel, those of a handle "
        "without explicit settings are used.",
        "BYTES",
        (1, MAX_BLOCK_NBYTES),
        bench=None,
        ds_io=1 << 20,
    ),
    Field(
        "queue_depth",
        "The maximum number of blocks in flight.",
        "N",
        (1, MAX_QUEUE_DEPTH),
        bench=None,
        ds_io=32,
    ),
    Field(
        "io_parallel",
        "The number of worker threads, each with a queue.",
        "N",
        (1, MAX_PARALLELISM),
        bench=None,
        ds_io=None,
    ),
    Field("single_submit", "Use one system call for each block.", bench=False, ds_io=False),
    Field(
        "memory",
        "The host memory: from tensorferry.empty() (default); unaligned and on small pages; or pinned by torch. With "
        "--gpu: copy all bytes through this memory, instead of passing the CUDA tensor to the handle.",
        "locked|ordinary|accelerator",
        bench=None,
    ),
    Field(
        "use_accelerator_pin_memory", "The same as --memory accelerator.", bench=False, ds_io=False
    ),
    Field(
        "gpu", "Transfer CUDA tensors.", bench=False, ds_io=False, tune=False, ds_nvme_tune=False
    ),
    Field(
        "use_gds",
        "Transfer CUDA tensors with gds_handle (GPUDirect Storage).",
        bench=False,
        ds_io=False,
        tune=False,
        ds_nvme_tune=False,
        tuner_name="gds",
    ),
    Field(
        "compare",
        "Also measure plain Python and fio, alternately, with the same sizes and settings.",
        bench=False,
    ),
    Field(
        "sweep_config",
        "JSON file with lists of values to try: block_size, queue_depth, io_parallel, single_submit, io_engine.",
        "PATH",
        tune=None,
        ds_nvme_tune=None,
    ),
    Field("quick", f"The same as --seconds {QUICK_SECONDS:g}.", tune=False),
    Field(
        "seconds",
        "The maximum time of measurements for each drive, with up to a dozen settings. More time can prove smaller "
        "gains.",
        "SECONDS",
        (1, 3600),
        tune=SECONDS,
    ),
    Field(
        "log_dir",
        "The folder for a JSON file with all measurements.",
        "PATH",
        ds_nvme_tune=Path("_aio_bench_logs"),
    ),
    Field("verbose", "Print all tables.", ds_nvme_tune=False),
    Field("flush_page_cache", _NOTHING, ds_nvme_tune=False),
    Field("slow_bounce_buffer", _NOTHING, bench=False, ds_io=False),
    Field("torch_legacy_save", _NOTHING, bench=False, ds_io=False),
    Field("fast_io_size", _NOTHING, "BYTES", bench=None, ds_io=None),
    Field("sequential_requests", _NOTHING, bench=False, ds_io=False),
    Field("csv", "Accepted, without effect: use --json.", bench=False),
    Field("json", "Print the complete result as JSON, and nothing else.", bench=False, tune=False),
)


def command_with(
    command: str, run: Callable[[dict[str, Any]], None], **given: Any
) -> Callable[..., None]:
    """Return a function with a command's options as its parameters, and the docstring of ``run``.

    It calls ``run`` with the values of all fields. Those that the command does not have are in ``given``, or have the
    default of the similar command.
    """
    similar = "tune" if command in _TUNERS else "bench"
    others = {field.name: getattr(field, similar) for field in FIELDS} | given

    def call(**values: Any) -> None:
        plain = {n: v.value if isinstance(v, Enum) else v for n, v in values.items()}
        run(others | plain)

    parameters = [each for field in FIELDS if (each := field.parameter(command))]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = run.__doc__
    return call
