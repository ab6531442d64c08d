"""The GPU engine: stacked clients, CUDA graphs and Triton kernels.

- ``stacked.py``: the engine :class:`~fedsift.engine.gpu.stacked.Stacked`
- ``stacked_task.py``: the joined data of all clients, and the model's output
- ``arithmetic.py``: precision, and sums in a fixed order
- ``memory.py``: page-locked memory, and advice if memory runs out
- ``graph_step.py``: one local step of all clients as a CUDA graph
- ``graph.py``: recording a CUDA graph
- ``ways.py``: the ways to compute gradients or losses, and the choice of one by trying
- ``unsupported.py``: why one of them does not work
- ``one_batch/``: the way in which all clients' samples form one batch
- ``gradients.py``: the gradients of all clients
- ``losses.py``: the losses of all clients, for methods without gradients
- ``one_batch/``: all clients' samples in one batch
- ``network.py``: a model made of known layers, computed for all clients at once
- ``layers.py``, ``batch_norm.py``: these layers, as autograd functions
- ``weight.py``: a parameter of all clients
- ``channels_last.py``: the memory layout of their parameters
- ``triton.py``: the kernels
"""
