"""Checkpoints of other versions of torch, by version; `make.py` makes them."""
