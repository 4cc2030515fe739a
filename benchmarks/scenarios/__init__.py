"""The scenarios by name; each is a function from settings to what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.scenarios import (
    checkpoint,
    deepnvme,
    fairness,
    gpu,
    import_time,
    large,
    offload,
    safetensors,
    safetensors_save,
    segments,
    small_reads,
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
    "loop": large.run_on_loop_device,
    "segments": segments.run,
    "striped": striped.run,
    "store": store.run,
    "warm": warm.run,
    "random": small_reads.many,
    "latency": small_reads.blocking,
    "fairness": fairness.run,
    "import": import_time.run,
    "tune": tune.run,
    "zero3": zero3.run,
    "checkpoint": checkpoint.save,
    "checkpoint_load": checkpoint.load,
    "checkpoint_loop": checkpoint.save_and_load_on_loop_device,
    "checkpoint_objects": checkpoint.objects,
    "checkpoint_async": checkpoint.saved_asynchronously,
    "safetensors": safetensors.run,
    "safetensors_cached": safetensors.run_cached,
    "safetensors_files": safetensors.run_on_four_files,
    "safetensors_loop": safetensors.run_on_loop_device,
    "safetensors_plans": safetensors.plans,
    "safetensors_save": safetensors_save.run,
    "safetensors_storage": safetensors_save.run_storage,
    "offload": offload.run,
    "offload_drives": offload.run_on_two_drives,
    "offload_deepspeed": offload.run_beside_deepspeed,
    "stream_weights": stream_weights.run,
    "gpu": gpu.run,
    "gpu_tmpfs": gpu.run_on_tmpfs,
}
