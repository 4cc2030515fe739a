"""Move tensors between files and memory as fast as the storage can go, and never lose a byte silently.

>>> import tensorferry
>>> tensorferry.write(path, tensor)  # doctest: +SKIP
>>> tensorferry.read(path, tensor)   # doctest: +SKIP

``help()`` of each name below says more, as does the user guide; ``tensorferry.checkpoint``, ``safetensors``, ``store``,
``offload`` and ``deepspeed`` are imported by themselves.
"""

from tensorferry.deepnvme.gds import gds_handle
from tensorferry.deepnvme.handles import aio_handle
from tensorferry.errors import (
    ChecksumError,
    EngineUnavailableError,
    ShortReadError,
    StorageError,
)
from tensorferry.table import Table
from tensorferry.transfer.calls import open, read, read_many, write, write_many
from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.files import File
from tensorferry.transfer.futures import Future
from tensorferry.transfer.memory import bounce_pool_nbytes, empty, set_bounce_pool_nbytes
from tensorferry.transfer.runtime import engines
from tensorferry.transfer.streams import Field, Stream
from tensorferry.transfer.striped import StripedFile

__version__ = "0.2.0"

__all__ = [
    "ChecksumError",
    "Checksums",
    "EngineUnavailableError",
    "Field",
    "File",
    "Future",
    "ShortReadError",
    "StorageError",
    "Stream",
    "StripedFile",
    "Table",
    "aio_handle",
    "bounce_pool_nbytes",
    "empty",
    "engines",
    "gds_handle",
    "open",
    "read",
    "read_many",
    "set_bounce_pool_nbytes",
    "write",
    "write_many",
]

# Other modules of the package are its own affair.
_PRODUCTS = ["checkpoint", "deepspeed", "offload", "safetensors", "store"]


def __dir__() -> list[str]:
    return sorted(
        [*__all__, *_PRODUCTS, "__doc__", "__file__", "__name__", "__path__", "__version__"]
    )
