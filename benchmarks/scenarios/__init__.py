"""The scenarios by name; each is a function from settings to what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.scenarios import (
    checkpoint,
    checkpoint_async,
    checkpoint_load,
    checkpoint_objects,
    deepnvme,
    ds_io,
    fairness,
    gpu,
    import_time,
    large,
    latency,
    loop_device,
    memory,
    random_reads,
    segments,
    torch_save,
    tune,
    warm,
    zero3,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Outcome, Settings

SCENARIOS: dict[str, Callable[[Settings], Outcome]] = {
    "large": large.run,
    "deepspeed": deepnvme.run,
    "ds_io": ds_io.run,
    "loop": loop_device.run,
    "segments": segments.run,
    "warm": warm.run,
    "random": random_reads.run,
    "latency": latency.run,
    "fairness": fairness.run,
    "memory": memory.run,
    "import": import_time.run,
    "torch_save": torch_save.run,
    "tune": tune.run,
    "zero3": zero3.run,
    "checkpoint": checkpoint.run,
    "checkpoint_load": checkpoint_load.run,
    "checkpoint_objects": checkpoint_objects.run,
    "checkpoint_async": checkpoint_async.run,
    "gpu": gpu.run,
    "gpu_tmpfs": gpu.run_on_tmpfs,
}
