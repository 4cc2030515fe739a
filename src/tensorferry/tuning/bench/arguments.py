"""From what was typed to a job: every problem is found before any I/O, and all are told at once."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tensorferry
from tensorferry.tuning import gpus
from tensorferry.tuning.bench.options import OPTIONS

Operation: TypeAlias = Literal["write", "read"]

# What a handle is told, by the option that says it.
_SETTINGS = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "io_parallel": "intra_op_parallelism",
    "io_engine": "engine",
}


class BadArgumentsError(Exception):
    """Arguments cannot be used; ``problems`` has a line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


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
        "locked"  # an option's, or "gpu": CUDA tensors go to handles and files as they are
    )
    gpu: bool = False
    use_gds: bool = False
    slow_bounce_buffer: bool = False
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
        return self.engine == "torch_io"

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        values = dataclasses.asdict(self)
        del values["notes"]
        values["places"] = [
            {"folder": str(place.folder), "device": place.device} for place in self.places
        ]
        return values


def make_job(**given: Any) -> Job:
    """Return the job that options ask for: their texts (or True) by the names of OPTIONS; None was not given.

    Raises
    ------
    BadArgumentsError
        They cannot be used, or the machine lacks what they need; it has all the reasons.
    """
    return _Checker(given).job()


def folder_problems(option: str, folder: str) -> list[str]:
    """Return what is wrong with a folder as an argument."""
    path = Path(folder)
    if not path.exists():
        return [f"{option}: the folder {folder!r} does not exist (is the drive mounted?)"]
    if path.is_block_device():
        return [f"{option}: {folder!r} is a device; name a folder of the file system on it"]
    return [] if path.is_dir() else [f"{option}: {folder!r} is no folder"]


class _Checker:
    """Goes through the options and collects problems, and notes on what has no effect."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._given = {name: value for name, value in given.items() if value not in (None, False)}
        self._values = {each.name: self._value(each) for each in OPTIONS}

    def _value(self, option: Any) -> Any:
        """Return what an option says: None where nobody does, or where it cannot be read."""
        text = self._given.get(option.name, option.default)
        if option.read is None or option.many or text is None:
            return text if option.many or option.read else bool(text)
        try:
            return option.read(text)
        except ValueError as error:
            self._problems.append(f"{option.flag}: {error}")
            return None

    def job(self) -> Job:
        """Return it, or raise what is wrong."""
        values = self._values
        places, operations = self._places(), self._operations()
        settings, memory = self._settings(), self._memory()
        self._check_gpu(places)
        self._check_engine()
        if self._problems:
            raise BadArgumentsError(self._problems)
        same = {each.name for each in dataclasses.fields(Job)} & values.keys() - {"memory"}
        return Job(
            places=places,
            operations=operations,
            io_nbytes=values["io_size"],
            settings=settings,
            memory=memory,
            notes=tuple(self._notes),
            **{name: values[name] for name in same},
        )

    def _places(self) -> tuple[Place, ...]:
        folder, also = self._values["folder"], self._given.get("path")
        mappings = self._given.get("folder_to_device_mapping") or []
        if folder is not None and also is not None:
            self._problem("FOLDER, --folder: choose one of them")
            return ()
        folder = also if folder is None else folder
        count = self._values["multi_process"] or 1
        if folder is not None and mappings:
            self._problem("--folder, --folder-to-device-mapping: choose one of them")
        if folder is not None:
            self._problems += folder_problems("--folder" if also is None else "FOLDER", folder)
            return tuple(Place(Path(folder), number) for number in range(count))
        if not mappings:
            self._problem(
                "--folder: a folder is needed, or --folder-to-device-mapping FOLDER:DEVICE"
            )
        elif count not in (1, len(mappings)):
            self._notes.append(
                f"--multi-process {count} has no effect: there is one process for each of the "
                f"{len(mappings)} folder mappings"
            )
        return tuple(place for mapping in mappings if (place := self._mapped(mapping)))

    def _mapped(self, mapping: str) -> Place | None:
        option = "--folder-to-device-mapping"
        name, _, device = mapping.rpartition(":")
        if not name or not device.isascii() or not device.isdigit():
            self._problem(f"{option}: {mapping!r} is not FOLDER:DEVICE, such as /mnt/nvme0:0")
            return None
        self._problems += folder_problems(option, name)
        return Place(Path(name), int(device))

    def _operations(self) -> tuple[Operation, ...]:
        read, write = self._values["read"], self._values["write"]
        wanted: list[Operation] = ["write"] if write or not read else []
        return (*wanted, "read") if read or not write else tuple(wanted)

    def _settings(self) -> dict[str, Any]:
        values = self._values
        settings = {name: values[option] for option, name in _SETTINGS.items() if values[option]}
        if values["single_submit"]:
            settings["single_submit"] = True
        if values["sequential_requests"]:
            settings["overlap_events"] = False
        engine = values["io_engine"]
        if engine and (reason := tensorferry.engines()[engine]):
            self._problem(f"--io-engine: {engine} cannot be had here: {reason}")
        return settings

    def _memory(self) -> str:
        values = self._values
        memory = "accelerator" if values["use_accelerator_pin_memory"] else values["memory"]
        if values["use_gds"] and (memory is not None or values["slow_bounce_buffer"]):
            self._notes.append(
                "--use-gds: there is no host memory to choose, nor a bounce buffer that could be slow"
            )
        if values["use_gds"] or (
            values["gpu"] and memory is None and not values["slow_bounce_buffer"]
        ):
            return "gpu"
        if memory == "accelerator" and gpus.device_count() == 0:
            # What ds_io does there, too: its CPU accelerator gives the tensor back as it is.
            self._notes.append(
                "no CUDA device that could pin memory: transfers use ordinary memory"
            )
            return "ordinary"
        return memory or "locked"

    def _check_gpu(self, places: tuple[Place, ...]) -> None:
        values = self._values
        if values["use_gds"]:
            if not values["gpu"]:
                self._problem("--use-gds: needs --gpu")
            if values["engine"] not in (None, "aio_handle"):
                self._problem(
                    f"--use-gds: gds_handle takes the place of --engine aio_handle, not of {values['engine']}"
                )
            if values["io_engine"] is not None:
                self._problem("--io-engine: gds_handle has an engine of its own, cuFile")
            if reason := gpus.why_no_gds():
                self._problem(f"--use-gds: {reason}")
        if not values["gpu"]:
            if values["slow_bounce_buffer"]:
                self._notes.append("--slow-bounce-buffer has no effect without --gpu")
            return
        if reason := gpus.why_no_gpu():
            self._problem(f"--gpu: {reason}")
            return
        count = gpus.device_count()
        for device in sorted({place.device for place in places if place.device >= count}):
            self._problem(
                f"--gpu: there is no device {device}; torch finds {count}, counted from 0"
            )

    def _check_engine(self) -> None:
        values = self._values
        engine = values["engine"]
        if engine == "torch_io" and importlib.util.find_spec("torch") is None:
            self._problem(f"--engine {engine}: {gpus.NO_TORCH}")
        if values["torch_legacy_save"] and engine != "torch_io":
            self._notes.append(f"--torch-legacy-save has no effect with --engine {engine}")
        if values["fast_io_size"] is not None:
            self._notes.append("--fast-io-size has no effect")
        for option, flag in (
            ("io_parallel", "--io-parallel"),
            ("single_submit", "--single-submit"),
        ):
            if engine == "files" and values[option]:
                self._problem(f"{flag}: tensorferry.open() has no such setting")

    def _problem(self, text: str) -> None:
        self._problems.append(text)
