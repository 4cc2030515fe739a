"""The project: its docs, examples, benchmarks and the package as a whole."""
