"""Files and transfers: what moves bytes between files and memory, for all products."""
