"""Store a GPU tensor in a file with tensorferry's aio_handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils

import tensorferry

if TYPE_CHECKING:
    import torch


def file_write(path: str, tensor: torch.Tensor, handle: tensorferry.aio_handle) -> None:
    # The write waits for the GPU work that computes the tensor, and does not need host memory of the tensor's size.
    handle.sync_pwrite(tensor, path)


def main() -> None:
    options = utils.store_options(__doc__)
    utils.require_gpu()
    handle = tensorferry.aio_handle()
    utils.measure_store(
        "aio store_gpu",
        options,
        utils.random_tensor(options.nbytes).cuda(),
        lambda path, tensor: file_write(path, tensor, handle),
    )


if __name__ == "__main__":
    utils.run(main)
