"""Mirrors: a separate process of the first rank copies checkpoints from the local drive to a bucket.

The module ``mirror`` is the part in the training's process. ``process`` is the main module of the separate process.
There, ``uploading`` uploads files, and ``bucket`` lists and removes the objects in the bucket. ``bucket`` and the
modules of the separate process do not import torch.
"""
