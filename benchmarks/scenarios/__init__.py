"""The scenarios by name; each is a function that receives the settings and returns its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.scenarios import (
    buckets,
    checkpoint,
    files,
    larger_than_memory,
    mirror,
    offload,
    safetensors,
    small,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Outcome, Settings

SCENARIOS: dict[str, Callable[[Settings], Outcome]] = {
    "large": files.large,
    "deepspeed": files.deepspeed,
    "segments": files.segments,
    "store": small.store,
    "warm": files.warm,
    "random": small.random_reads,
    "latency": small.latency,
    "import": small.import_time,
    "zero3": offload.zero3,
    "zero_checkpoint": zero.checkpoint,
    "checkpoint": checkpoint.save,
    "checkpoint_load": checkpoint.load,
    "checkpoint_loop": checkpoint.loop,
    "checkpoint_objects": checkpoint.objects,
    "checkpoint_async": checkpoint.asynchronous,
    "mirror": mirror.steps,
    "safetensors": safetensors.cold,
    "safetensors_cached": safetensors.cached,
    "safetensors_files": safetensors.four_files,
    "safetensors_loop": safetensors.loop,
    "safetensors_mount": safetensors.mount,
    "safetensors_plans": safetensors.plans,
    "safetensors_ranks": safetensors.ranks,
    "buckets": buckets.load,
    "safetensors_save": safetensors.save,
    "safetensors_storage": safetensors.storage,
    "offload_deepspeed": offload.beside_deepspeed,
    "larger_than_memory": larger_than_memory.step,
    "stream_weights": offload.streamed_weights,
    "embedding": offload.table_embedding,
}
