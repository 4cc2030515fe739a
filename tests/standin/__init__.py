"""Tests of the stand-in driver, and the GPU suite again with it in place of a GPU."""
