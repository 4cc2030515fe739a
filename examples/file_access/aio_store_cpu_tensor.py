"""Store a CPU tensor in a file with tensorferry's aio_handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils

import tensorferry

if TYPE_CHECKING:
    import torch


def file_write(path: str, tensor: torch.Tensor, handle: tensorferry.aio_handle) -> None:
    # The tensor is in ordinary memory. A locked copy of the same size is not needed: blocks are copied one at a time.
    handle.sync_pwrite(tensor, path)


def main() -> None:
    options = utils.store_options(__doc__)
    handle = tensorferry.aio_handle()
    utils.measure_store(
        "aio store_cpu",
        options,
        utils.random_tensor(options.nbytes),
        lambda path, tensor: file_write(path, tensor, handle),
    )


if __name__ == "__main__":
    utils.run(main)
