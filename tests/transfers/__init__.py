"""Tests of transfers: files, handles, futures, memory, and failures."""
