"""Load a file into a CPU tensor with DeepSpeed's own aio_handle, as in its tutorial, for comparison."""

from __future__ import annotations

from typing import Any

import torch
import utils


def file_read(path: str, handle: Any, buffer: torch.Tensor) -> torch.Tensor:
    if handle.sync_pread(buffer, path) != 1:  # DeepSpeed reports a failure by a result other than 1
        raise OSError(f"DeepSpeed did not read {path}")
    return buffer


def main() -> None:
    options = utils.load_options(__doc__)
    handle = utils.require_deepspeed().aio_handle()
    buffer = handle.new_cpu_locked_tensor(options.nbytes, torch.empty(0, dtype=torch.uint8))
    utils.measure_load("deepspeed load_cpu", options, lambda path: file_read(path, handle, buffer))
    handle.free_cpu_locked_tensor(buffer)


if __name__ == "__main__":
    utils.run(main)
