"""Tests that need the stand-in driver: ordered errors, delays, and counts of its calls."""
