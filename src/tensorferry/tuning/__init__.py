"""What a machine and its drives can do: report, benchmark, tune."""
