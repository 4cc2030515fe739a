"""The scenarios by name; each is a function from settings to what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.scenarios import (
    checkpoint,
    checkpoint_async,
    checkpoint_load,
    checkpoint_objects,
    deepnvme,
    fairness,
    gpu,
    import_time,
    large,
    latency,
    loop_device,
    offload,
    random_reads,
    safetensors,
    safetensors_plans,
    safetensors_save,
    segments,
    store,
    stream_weights,
    striped,
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
    "loop": loop_device.run,
    "segments": segments.run,
    "striped": striped.run,
    "store": store.run,
    "warm": warm.run,
    "random": random_reads.run,
    "latency": latency.run,
    "fairness": fairness.run,
    "import": import_time.run,
    "tune": tune.run,
    "zero3": zero3.run,
    "checkpoint": checkpoint.run,
    "checkpoint_load": checkpoint_load.run,
    "checkpoint_objects": checkpoint_objects.run,
    "checkpoint_async": checkpoint_async.run,
    "safetensors": safetensors.run,
    "safetensors_cached": safetensors.run_cached,
    "safetensors_files": safetensors.run_on_four_files,
    "safetensors_loop": safetensors.run_on_loop_device,
    "safetensors_plans": safetensors_plans.run,
    "safetensors_save": safetensors_save.run,
    "safetensors_storage": safetensors_save.run_storage,
    "offload": offload.run,
    "offload_drives": offload.run_on_two_drives,
    "offload_deepspeed": offload.run_beside_deepspeed,
    "stream_weights": stream_weights.run,
    "gpu": gpu.run,
    "gpu_tmpfs": gpu.run_on_tmpfs,
}
