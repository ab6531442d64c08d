"""Reproduce the paper's table and figures from pinned configurations.

``experiments.py`` reads the configurations in ``pinned/``, ``plan.py`` turns them into runs,
``runner.py`` executes one run and ``parallel.py`` many. ``results.py`` (tables of accuracy),
``traffic.py`` (tables of bytes) and ``updates.py`` (magnitudes) evaluate runs; ``figures.py`` draws
them, and ``result_files.py`` writes everything.
"""
