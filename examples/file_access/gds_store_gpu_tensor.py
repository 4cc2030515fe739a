"""Store a GPU tensor in a file with gds_handle: GPUDirect Storage transfers it from GPU memory to the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils

if TYPE_CHECKING:
    import torch

    import tensorferry


def file_write(path: str, tensor: torch.Tensor, handle: tensorferry.gds_handle) -> None:
    handle.sync_pwrite(tensor, path)


def main() -> None:
    options = utils.store_options(__doc__)
    handle = utils.require_gds()
    tensor = utils.random_tensor(options.nbytes).cuda()
    handle.pin_device_tensor(tensor)
    utils.measure_store(
        "gds store_gpu", options, tensor, lambda path, tensor: file_write(path, tensor, handle)
    )
    handle.unpin_device_tensor(tensor)


if __name__ == "__main__":
    utils.run(main)
