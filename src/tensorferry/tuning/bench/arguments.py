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
from tensorferry.tuning.options import BadArgumentsError, folder_problems, values_of

Operation: TypeAlias = Literal["write", "read"]
_OPERATIONS: tuple[Operation, ...] = ("write", "read")

# What a handle is told, by the option that says it.
_SETTINGS = {
    "block_size": "block_size",
    "queue_depth": "queue_depth",
    "io_parallel": "intra_op_parallelism",
    "io_engine": "engine",
    "single_submit": "single_submit",
}


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
        places = [
            dataclasses.asdict(place) | {"folder": str(place.folder)} for place in self.places
        ]
        return values | {"places": places}


def make_job(**given: Any) -> Job:
    """Return the job that options ask for: their texts (or True) by the names of OPTIONS; None was not given.

    Raises
    ------
    BadArgumentsError
        They cannot be used, or the machine lacks what they need; it has all the reasons.
    """
    return _Checker(given).job()


class _Checker:
    """Goes through the options and collects problems, and notes on what has no effect."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._values = values_of(OPTIONS, given, self._problems)

    def job(self) -> Job:
        """Return it, or raise what is wrong."""
        values = self._values
        places, settings, memory = self._places(), self._settings(), self._memory()
        self._check_gpu(places)
        self._check_engine()
        if self._problems:
            raise BadArgumentsError(self._problems)
        same = {each.name for each in dataclasses.fields(Job)} & values.keys() - {"memory"}
        both = values["read"] == values["write"]
        return Job(
            places=places,
            operations=tuple(each for each in _OPERATIONS if both or values[each]),
            io_nbytes=values["io_size"],
            settings=settings,
            memory=memory,
            notes=tuple(self._notes),
            **{name: values[name] for name in same},
        )

    def _places(self) -> tuple[Place, ...]:
        values = self._values
        names = {"path": "FOLDER", "folder": "--folder"}
        names["folder_to_device_mapping"] = "--folder-to-device-mapping"
        given = [name for name in names if values[name] not in (None, [])]
        count, mappings = values["multi_process"] or 1, values["folder_to_device_mapping"] or []
        if len(given) > 1:
            named = ", ".join(names[name] for name in given)
            self._problems.append(f"{named}: choose one of them")
            return ()
        if not given:
            self._problems.append(
                "--folder: a folder is needed, or --folder-to-device-mapping FOLDER:DEVICE"
            )
        elif not mappings:
            folder = values[given[0]]
            self._problems += folder_problems(names[given[0]], folder)
            return tuple(Place(Path(folder), number) for number in range(count))
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
            problem = f"{option}: {mapping!r} is not FOLDER:DEVICE, such as /mnt/nvme0:0"
            self._problems.append(problem)
            return None
        self._problems += folder_problems(option, name)
        return Place(Path(name), int(device))

    def _settings(self) -> dict[str, Any]:
        values = self._values
        settings = {name: values[option] for option, name in _SETTINGS.items() if values[option]}
        if values["sequential_requests"]:
            settings["overlap_events"] = False
        engine = values["io_engine"]
        if engine and (reason := tensorferry.engines()[engine]):
            self._problems.append(f"--io-engine: {engine} cannot be had here: {reason}")
        return settings

    def _memory(self) -> str:
        values = self._values
        memory = "accelerator" if values["use_accelerator_pin_memory"] else values["memory"]
        on_host = memory is not None or values["slow_bounce_buffer"]
        if values["use_gds"] and on_host:
            self._notes.append(
                "--use-gds: there is no host memory to choose, nor a bounce buffer that could be slow"
            )
        if values["use_gds"] or (values["gpu"] and not on_host):
            return "gpu"
        if memory == "accelerator" and gpus.device_count() == 0:
            # What ds_io does there, too: its CPU accelerator gives the tensor back as it is.
            self._notes.append(
                "no CUDA device that could pin memory: transfers use ordinary memory"
            )
            return "ordinary"
        return memory or "locked"

    def _check_gpu(self, places: tuple[Place, ...]) -> None:
        values, problems = self._values, self._problems
        if values["use_gds"]:
            if not values["gpu"]:
                problems.append("--use-gds: needs --gpu")
            if values["engine"] not in (None, "aio_handle"):
                problems.append(
                    f"--use-gds: gds_handle takes the place of --engine aio_handle, not of {values['engine']}"
                )
            if values["io_engine"] is not None:
                problems.append("--io-engine: gds_handle has an engine of its own, cuFile")
            if reason := gpus.why_no_gds():
                problems.append(f"--use-gds: {reason}")
        if not values["gpu"]:
            if values["slow_bounce_buffer"]:
                self._notes.append("--slow-bounce-buffer has no effect without --gpu")
        elif reason := gpus.why_no_gpu():
            problems.append(f"--gpu: {reason}")
        else:
            count = gpus.device_count()
            for device in sorted({place.device for place in places if place.device >= count}):
                problems.append(
                    f"--gpu: there is no device {device}; torch finds {count}, counted from 0"
                )

    def _check_engine(self) -> None:
        values = self._values
        engine = values["engine"]
        if engine == "torch_io" and importlib.util.find_spec("torch") is None:
            self._problems.append(f"--engine {engine}: {gpus.NO_TORCH}")
        if values["torch_legacy_save"] and engine != "torch_io":
            self._notes.append(f"--torch-legacy-save has no effect with --engine {engine}")
        if values["fast_io_size"] is not None:
            self._notes.append("--fast-io-size has no effect")
        if engine == "files":
            self._problems += [
                f"--{name.replace('_', '-')}: tensorferry.open() has no such setting"
                for name in ("io_parallel", "single_submit")
                if values[name]
            ]
