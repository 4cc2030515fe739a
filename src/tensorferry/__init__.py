"""Move tensors between files and memory as fast as the storage can go, and never lose a byte silently.

>>> import tensorferry
>>> tensorferry.write(path, tensor)  # doctest: +SKIP
>>> tensorferry.read(path, tensor)   # doctest: +SKIP

See ``help()`` of each name below, and the user guide in ``docs/``.
"""

from tensorferry.checksums import Checksums
from tensorferry.errors import (
    ChecksumError,
    EngineUnavailableError,
    ShortReadError,
    StorageError,
)
from tensorferry.files import File, open, read, read_many, write, write_many
from tensorferry.futures import Future
from tensorferry.gds import gds_handle
from tensorferry.handles import aio_handle
from tensorferry.memory import bounce_pool_nbytes, empty, set_bounce_pool_nbytes
from tensorferry.runtime import engines

__version__ = "0.1.0"

__all__ = [
    "ChecksumError",
    "Checksums",
    "EngineUnavailableError",
    "File",
    "Future",
    "ShortReadError",
    "StorageError",
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
