"""tensorferry side by side with its peers: fio, plain Python, torch and DeepSpeed.

``python -m benchmarks`` runs every scenario; README.md says what each one measures and by which
rules.
"""
