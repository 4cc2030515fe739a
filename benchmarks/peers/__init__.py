"""The contenders that live in Python: each class runs in a worker (see worker.py).

Their methods take a path, measure one operation and answer with what it cost. Memory is touched
before the clock runs, on both sides: on virtual machines a first touch can cost more than the
transfer.
"""
