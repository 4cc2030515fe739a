"""Reports on a machine, and benchmarks and tuning of its drives."""
