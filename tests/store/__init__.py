"""Tests of stores: against a dictionary, with faults, what lasts, and who meets in one."""
