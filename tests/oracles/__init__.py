"""Oracles of the field's methods: FedAvg and what followed it, in plain NumPy float64.

Transcriptions of the papers, independent of `fedsift` (they import only NumPy and tests/oracle.py)
and written to be obviously right rather than fast. Rounds count from 1; steps and perturbations
count from 0.

`gradients` has one function w -> gradient per client. It is called once per local step, in order,
so that a gradient on mini-batches may count its calls. `weights` are the clients' weights in every
mean. `cohorts` lists the clients of each round. Whatever is random is an argument.
"""
