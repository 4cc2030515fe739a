"""Tests of what happens when something goes wrong."""
