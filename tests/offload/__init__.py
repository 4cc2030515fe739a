"""Tests of offloaded optimizers, which compare them with the same optimizers in memory."""
