"""Tests of tensorferry."""
