"""Where ``Field`` was in 0.1: it is ``tensorferry.Field`` now, and this module goes with the next release."""

import warnings

from tensorferry import Field, Stream

__all__ = ["Field", "Stream"]

warnings.warn(
    "tensorferry.streams.Field is tensorferry.Field now", DeprecationWarning, stacklevel=2
)
