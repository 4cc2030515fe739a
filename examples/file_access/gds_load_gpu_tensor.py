"""Load a file into a GPU tensor with gds_handle: GPUDirect Storage transfers it from the drive to GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import utils

if TYPE_CHECKING:
    import tensorferry


def file_read(path: str, handle: tensorferry.gds_handle, buffer: torch.Tensor) -> torch.Tensor:
    handle.sync_pread(buffer, path)
    return buffer


def main() -> None:
    options = utils.load_options(__doc__)
    handle = utils.require_gds()
    # Any CUDA tensor can be used. With a pinned tensor, cuFile does not need a copy within the GPU.
    example = torch.empty(0, dtype=torch.uint8, device="cuda")
    buffer = handle.new_pinned_device_tensor(options.nbytes, example)
    utils.measure_load("gds load_gpu", options, lambda path: file_read(path, handle, buffer))
    handle.free_pinned_device_tensor(buffer)


if __name__ == "__main__":
    utils.run(main)
