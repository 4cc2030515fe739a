"""Tests of what the commands do."""
