"""Tests of what moves tensors: files, handles, futures, memory, and what happens when something goes wrong."""
