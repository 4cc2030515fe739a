"""What files of a checkpoint are called. Imports nothing: who mistypes a path is told before torch is imported."""

from __future__ import annotations

import re

METADATA_NAME = ".metadata"
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
"""What the metadata of one rank that saved without the others is called."""

DATA_FILE_SUFFIX = ".distcp"
