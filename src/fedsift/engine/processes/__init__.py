"""Engines that spread the clients over processes.

- ``forked.py``: the CPU engine, with one forked worker process per core
- ``pool.py``: the pool of its worker processes
- ``worker.py``: what a worker process does
- ``torchrun.py``: the engine over processes that torchrun started, on one or several machines
- ``messages.py``: the messages between the processes
"""
