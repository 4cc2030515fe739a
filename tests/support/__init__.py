"""Helpers of the tests: faults made on demand, leak checks, child processes."""
