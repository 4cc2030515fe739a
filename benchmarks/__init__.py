"""Benchmarks that compare tensorferry with fio, plain Python, torch and DeepSpeed.

``python -m benchmarks`` runs every scenario. README.md describes what each scenario measures and the rules of the
measurements.
"""
