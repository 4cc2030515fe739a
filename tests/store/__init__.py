"""Tests of stores: behaviour, random lives against a model, faults, untrusted manifests, handlers and threads."""
