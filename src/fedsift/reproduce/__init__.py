"""Reproduce the paper's table and figures from pinned configurations.

- ``experiments.py``: the configurations in ``pinned/``
- ``plan.py``: the runs that they describe; ``rivals.py``: those of methods at their best
- ``runner.py``, ``parallel.py``: executes one run, and many
- ``results.py``: tables of accuracy; ``traffic.py``: of bytes; ``rival_results.py``: of methods at
  their best; ``language.py``: of language models; ``rows.py``: their rows
- ``updates.py``: the magnitudes of updates
- ``figures.py``: the figures
- ``result_files.py``: writes all of it
"""
