"""Integrations with programs that serve models, which load weights with tensorferry; one module for each program."""

LOAD_FORMAT = "tensorferry"
