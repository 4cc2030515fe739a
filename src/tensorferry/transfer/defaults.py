"""What is used where no setting is given, and how far settings go.

It imports nothing: `import tensorferry` needs these numbers, and dataclasses alone would be a fifth of its time.
"""

# The core's own defaults and the docs are held to these by a test.
DEFAULT_BLOCK_NBYTES = 1 << 20
DEFAULT_QUEUE_DEPTH = 128

# Beyond these a queue has more memory than I/O in it.
MAX_QUEUE_DEPTH = 32768
MAX_BLOCK_NBYTES = 1 << 30

# Workers of a handle.
MAX_PARALLELISM = 256
