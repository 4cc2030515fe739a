"""What every other package stands on, and what knows none of them: checks, processes, mounts, arithmetic."""
