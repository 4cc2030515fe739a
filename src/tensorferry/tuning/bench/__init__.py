"""``tensorferry bench``: how fast files are read and written, by which way, and at what cost.

``arguments`` turns what was typed into a ``Job``, or lists all that is wrong with it; ``run`` does the job with a
crew of processes, each of which is a ``Task`` with some of the ``ways``; ``results`` is what comes out.
"""
