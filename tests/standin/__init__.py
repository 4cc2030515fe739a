"""The stand-in driver: its own tests, and the GPU suite again with it in place of a GPU."""
