"""Runs the suite again in processes with seccomp filters that forbid the faster engines."""
