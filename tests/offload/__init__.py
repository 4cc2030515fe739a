"""Offloaded optimizers beside the same in memory."""
