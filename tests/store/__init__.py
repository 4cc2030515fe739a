"""Tests of stores: compared with a dictionary, with faults, after a close, and with concurrent users."""
