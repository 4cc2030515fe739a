"""Programs that serve models, reading weights by tensorferry; each has a module that imports it."""

LOAD_FORMAT = "tensorferry"
