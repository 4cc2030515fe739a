"""From what was typed to a job: every problem is found before any I/O, and all are told at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tensorferry
from tensorferry.tuning import gpus
from tensorferry.tuning.sizes import parse_nbytes

Operation: TypeAlias = Literal["write", "read"]

ENGINES = ("aio_handle", "aio_basic", "torch_io", "torch_fastio", "files")
MEMORIES = ("locked", "ordinary", "accelerator")
TORCH_ENGINES = ("torch_io", "torch_fastio")

_MAX_FILE_NBYTES = (1 << 63) - 1
_MAX_PROCESSES = 1024
_MAX_LOOPS = 1_000_000


class BadArgumentsError(Exception):
    """Arguments cannot be used; ``problems`` has a line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass
class Arguments:
    """A command line. Numbers may still be text, None is what was not given; names are ds_io's."""

    folder: str | None = None
    also_folder: str | None = None  # by position
    folder_to_device_mapping: list[str] = field(default_factory=list)
    io_size: str = "1G"
    read: bool = False
    write: bool = False
    multi_process: str = "1"
    engine: str = "aio_handle"
    io_engine: str | None = None
    block_size: str | None = None
    queue_depth: str | None = None
    io_parallel: str | None = None
    single_submit: bool = False
    sequential_requests: bool = False
    loops: str = "3"
    warmup_loops: str = "1"
    include_warmup_time: bool = False
    different_file_each_iteration: bool = False
    validate: bool = False
    memory: str | None = None
    gpu: bool = False
    use_gds: bool = False
    slow_bounce_buffer: bool = False
    fast_io_size: str = "64M"
    torch_legacy_save: bool = False
    compare: bool = False
    keep_files: bool = False
    outputs: dict[str, Path | None] = field(default_factory=dict)  # option to file


@dataclass(frozen=True)
class Place:
    """Where one process works: a folder, and the GPU that its memory is on, if any."""

    folder: Path
    device: int


@dataclass(frozen=True)
class Job:
    """What a benchmark does: sizes in bytes, a place for each process."""

    places: tuple[Place, ...]
    operations: tuple[Operation, ...]
    io_nbytes: int
    engine: str = "aio_handle"
    settings: dict[str, Any] = field(default_factory=dict)  # of aio_handle: those that were given
    loops: int = 3
    warmup_loops: int = 1
    include_warmup_time: bool = False
    different_file_each_iteration: bool = False
    validate: bool = False
    memory: str = (
        "locked"  # one of MEMORIES; "gpu": CUDA tensors go to handles and files as they are
    )
    gpu: bool = False
    use_gds: bool = False
    slow_bounce_buffer: bool = False
    fast_io_nbytes: int = 64 << 20
    torch_legacy_save: bool = False
    compare: bool = False
    keep_files: bool = False
    notes: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """What is measured: the engine, or the handle that takes its place."""
        return "gds_handle" if self.use_gds else self.engine

    @property
    def total_loops(self) -> int:
        """All loops, those that warm up included."""
        return self.warmup_loops + self.loops

    @property
    def files_per_process(self) -> int:
        """Files that each process has of one operation."""
        return self.total_loops if self.different_file_each_iteration else 1

    @property
    def makes_new_files(self) -> bool:
        """Whether each write creates its file; else later loops overwrite what the first has made. As in ds_io."""
        return self.engine in ("aio_basic", *TORCH_ENGINES)

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        values = dataclasses.asdict(self)
        del values["notes"]
        values["places"] = [
            {"folder": str(place.folder), "device": place.device} for place in self.places
        ]
        return values


def make_job(arguments: Arguments) -> Job:
    """Return the job that the arguments ask for.

    Raises
    ------
    BadArgumentsError
        They cannot be used, or the machine lacks what they need; it has all the reasons.
    """
    return _Checker(arguments).job()


class _Checker:
    """Goes through the arguments and collects problems, and notes on what has no effect."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._problems: list[str] = []
        self._notes: list[str] = []

    def job(self) -> Job:
        given = self._arguments
        places = self._places()
        job = Job(
            places=places,
            operations=self._operations(),
            io_nbytes=self._nbytes("--io-size", given.io_size),
            engine=self._one_of("--engine", given.engine, ENGINES),
            settings=self._settings(),
            loops=self._count("--loops", given.loops, 1, _MAX_LOOPS),
            warmup_loops=self._count("--warmup-loops", given.warmup_loops, 0, _MAX_LOOPS),
            include_warmup_time=given.include_warmup_time,
            different_file_each_iteration=given.different_file_each_iteration,
            validate=given.validate,
            memory=self._memory(),
            gpu=given.gpu,
            use_gds=given.use_gds,
            slow_bounce_buffer=given.slow_bounce_buffer,
            fast_io_nbytes=self._nbytes("--fast-io-size", given.fast_io_size),
            torch_legacy_save=given.torch_legacy_save,
            compare=given.compare,
            keep_files=given.keep_files,
        )
        self._check_gpu(places)
        self._check_engine()
        self._check_outputs()
        if self._problems:
            raise BadArgumentsError(self._problems)
        return dataclasses.replace(job, notes=tuple(self._notes))

    def _places(self) -> tuple[Place, ...]:
        given = self._arguments
        mappings = given.folder_to_device_mapping
        folder = given.folder if given.folder is not None else given.also_folder
        if given.folder is not None and given.also_folder is not None:
            self._problem(f"two folders: {given.also_folder!r}, and --folder {given.folder!r}")
        count = self._count("--multi-process", given.multi_process, 1, _MAX_PROCESSES)
        if folder is not None and mappings:
            self._problem("--folder and --folder-to-device-mapping cannot be used together")
        if folder is None and not mappings:
            self._problem(
                "a folder is needed: --folder, or --folder-to-device-mapping FOLDER:DEVICE"
            )
        if folder is not None:
            self._check_folder("--folder", folder)
            return tuple(Place(Path(folder), number) for number in range(count))
        if mappings and count not in (1, len(mappings)):
            self._notes.append(
                f"--multi-process {count} has no effect: there is one process for each of the "
                f"{len(mappings)} folder mappings"
            )
        places = []
        for mapping in mappings:
            name, colon, device = mapping.rpartition(":")
            if not colon or not name or not device.isascii() or not device.isdigit():
                self._problem(
                    f"--folder-to-device-mapping: {mapping!r} is not FOLDER:DEVICE, such as /mnt/nvme0:0"
                )
                continue
            self._check_folder("--folder-to-device-mapping", name)
            places.append(Place(Path(name), int(device)))
        return tuple(places)

    def _operations(self) -> tuple[Operation, ...]:
        given = self._arguments
        wanted: list[Operation] = []
        if given.write or not given.read:
            wanted.append("write")
        if given.read or not given.write:
            wanted.append("read")
        if given.engine == "torch_fastio" and "read" in wanted:
            reason = "torch_fastio is a way to save; to read what torch.save wrote use torch_io"
            if given.read:
                self._problem(f"--read: {reason}")
            else:
                self._notes.append(f"no read: {reason}")
            wanted.remove("read")
        return tuple(wanted)

    def _settings(self) -> dict[str, Any]:
        given = self._arguments
        settings: dict[str, Any] = {}
        if given.block_size is not None:
            settings["block_size"] = self._nbytes("--block-size", given.block_size, (1 << 31) - 1)
        if given.queue_depth is not None:
            settings["queue_depth"] = self._count("--queue-depth", given.queue_depth, 1, 32768)
        if given.io_parallel is not None:
            settings["intra_op_parallelism"] = self._count(
                "--io-parallel", given.io_parallel, 1, 256
            )
        if given.single_submit:
            settings["single_submit"] = True
        if given.sequential_requests:
            settings["overlap_events"] = False
        if given.io_engine is not None:
            engines = tensorferry.engines()
            self._one_of("--io-engine", given.io_engine, tuple(engines))
            if reason := engines.get(given.io_engine):
                self._problem(f"--io-engine: {given.io_engine} cannot be had here: {reason}")
            settings["engine"] = given.io_engine
        return settings

    def _memory(self) -> str:
        given = self._arguments
        if given.use_gds and (given.memory is not None or given.slow_bounce_buffer):
            self._notes.append(
                "--use-gds: there is no host memory to choose, nor a bounce buffer that could be slow"
            )
        if given.use_gds or (given.gpu and given.memory is None and not given.slow_bounce_buffer):
            return "gpu"
        memory = self._one_of("--memory", given.memory or "locked", MEMORIES)
        if memory == "accelerator" and gpus.device_count() == 0:
            # What ds_io does there, too: its CPU accelerator gives the tensor back as it is.
            self._notes.append(
                "no CUDA device that could pin memory: transfers use ordinary memory"
            )
            return "ordinary"
        return memory

    def _check_gpu(self, places: tuple[Place, ...]) -> None:
        given = self._arguments
        if given.use_gds:
            if not given.gpu:
                self._problem("--use-gds needs --gpu")
            if given.engine != "aio_handle":
                self._problem(
                    f"--use-gds: gds_handle takes the place of --engine aio_handle, not of {given.engine}"
                )
            if given.io_engine is not None:
                self._problem("--io-engine: gds_handle has an engine of its own, cuFile")
            if reason := gpus.why_no_gds():
                self._problem(f"--use-gds: {reason}")
        if given.slow_bounce_buffer and not given.gpu:
            self._notes.append("--slow-bounce-buffer has no effect without --gpu")
        if not given.gpu:
            return
        if reason := gpus.why_no_gpu():
            self._problem(f"--gpu: {reason}")
            return
        count = gpus.device_count()
        for device in sorted({place.device for place in places}):
            if device >= count:
                self._problem(
                    f"--gpu: there is no device {device}; torch finds {count}, counted from 0"
                )

    def _check_engine(self) -> None:
        given = self._arguments
        if given.engine in TORCH_ENGINES and importlib.util.find_spec("torch") is None:
            self._problem(f"--engine {given.engine}: torch is not installed (pip install torch)")
        if given.torch_legacy_save and given.engine not in TORCH_ENGINES:
            self._notes.append(f"--torch-legacy-save has no effect with --engine {given.engine}")
        if given.engine == "files":
            for option, present in (
                ("--io-parallel", given.io_parallel is not None),
                ("--single-submit", given.single_submit),
            ):
                if present:
                    self._problem(f"{option}: tensorferry.open() has no such setting")

    def _check_outputs(self) -> None:
        for option, path in self._arguments.outputs.items():
            if path is None:
                continue
            if path.is_dir():
                self._problem(f"{option}: {path} is a folder")
            elif not path.parent.is_dir():
                self._problem(f"{option}: the folder {path.parent} does not exist")
            elif not os.access(path if path.exists() else path.parent, os.W_OK):
                self._problem(f"{option}: {path} cannot be written")

    def _check_folder(self, option: str, folder: str) -> None:
        path = Path(folder)
        if not path.exists():
            self._problem(f"{option}: the folder {folder!r} does not exist")
        elif not path.is_dir():
            self._problem(f"{option}: {folder!r} is no folder")

    def _one_of(self, option: str, value: str, choices: tuple[str, ...]) -> str:
        if value not in choices:
            self._problem(f"{option}: {value!r} is none of {', '.join(choices)}")
        return value

    def _nbytes(self, option: str, text: str, maximum: int = _MAX_FILE_NBYTES) -> int:
        try:
            nbytes = parse_nbytes(text)
        except ValueError as error:
            self._problem(f"{option}: {error}")
            return 1
        if not 1 <= nbytes <= maximum:
            self._problem(f"{option}: {text} is not between 1 byte and {maximum} bytes")
        return nbytes

    def _count(self, option: str, text: str, minimum: int, maximum: int) -> int:
        try:
            value = int(text)
        except ValueError:
            self._problem(f"{option}: {text!r} is no whole number")
            return minimum
        if not minimum <= value <= maximum:
            self._problem(f"{option}: {value} is not between {minimum} and {maximum}")
        return value

    def _problem(self, text: str) -> None:
        self._problems.append(text)
