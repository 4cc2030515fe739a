"""Default values and limits of the settings with which files and DeepNVMe's handles move bytes.

A block is what one submission to the kernel carries; the queue depth is the number of blocks in flight.

This module imports nothing, because `import tensorferry` needs these numbers and importing dataclasses alone would
add a fifth to its time.
"""

# A test checks that the core's defaults and the documentation agree with these.
DEFAULT_BLOCK_NBYTES = 1 << 20
DEFAULT_QUEUE_DEPTH = 128

# Above these limits a larger queue or block uses more memory without adding useful I/O.
MAX_QUEUE_DEPTH = 32768
MAX_BLOCK_NBYTES = 1 << 30

# The maximum number of worker threads of one handle.
MAX_PARALLELISM = 256
