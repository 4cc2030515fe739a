"""The module that had ``Field`` in 0.1. Use ``tensorferry.Field``; the next release removes this module."""

import warnings

from tensorferry import Field, Stream

__all__ = ["Field", "Stream"]

warnings.warn(
    "tensorferry.streams.Field is deprecated; use tensorferry.Field",
    DeprecationWarning,
    stacklevel=2,
)
