"""Helpers that every other package uses and that import no other package: checks, processes, mounts, arithmetic."""
