"""Transfers of GPU memory, on real GPUs through torch or on those of the stand-in driver."""
