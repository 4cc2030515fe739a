"""Load a file into a GPU tensor with gds_handle: from the drive into GPU memory."""

from __future__ import annotations

from typing import Any

import torch
import utils

import tensorferry


def file_read(path: str, handle: Any, buffer: torch.Tensor) -> torch.Tensor:
    handle.sync_pread(buffer, path)
    return buffer


def main() -> None:
    options = utils.load_options(__doc__)
    utils.require_gds()
    handle = tensorferry.gds_handle()
    buffer = torch.empty(options.nbytes, dtype=torch.uint8, device="cuda")
    handle.pin_device_tensor(buffer)
    utils.measure_load("gds load_gpu", options, lambda path: file_read(path, handle, buffer))
    handle.unpin_device_tensor(buffer)


if __name__ == "__main__":
    utils.run(main)
