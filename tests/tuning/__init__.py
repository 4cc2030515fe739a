"""Tests of the code behind the commands: measuring, tuning, reports."""
