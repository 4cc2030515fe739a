"""Move tensors between files and memory as fast as the storage can go, and never lose a byte silently.

>>> import tensorferry
>>> tensorferry.write(path, tensor)  # doctest: +SKIP
>>> tensorferry.read(path, tensor)   # doctest: +SKIP

See ``help()`` of each name below, and the user guide. The subpackages ``tensorferry.checkpoint``, ``safetensors``,
``store``, ``offload`` and ``deepspeed`` are not imported with this package; import each one that you use.
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

# The public subpackages, which dir() lists. All other modules of the package are private.
_PRODUCTS = ["checkpoint", "deepspeed", "offload", "safetensors", "store"]


def __dir__() -> list[str]:
    return sorted(
        [*__all__, *_PRODUCTS, "__doc__", "__file__", "__name__", "__path__", "__version__"]
    )
