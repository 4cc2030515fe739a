"""Files and transfers: the layer that moves bytes between files and memory for every other package."""
