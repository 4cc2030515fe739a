"""Mirrors: checkpoints follow from the local drive to a bucket, by a process beside the training.

``mirror`` is what a training has of it. ``process`` does the work: ``uploading`` puts files there, and ``bucket`` knows
what lies where. ``bucket`` and what the process is made of import no torch.
"""
