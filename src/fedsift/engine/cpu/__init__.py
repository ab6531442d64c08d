"""Fast training of small networks on a CPU with C kernels.

- ``kernels.c``: the kernels, which keep the batch as the innermost axis of memory
- ``native.py``: loads and calls them
- ``kernel_support.py``: which layers and inputs they support
- ``recorded.py``: the loss and gradient of a whole network as a recorded list of kernel calls
- ``recorded_convolutions.py``: the calls of its convolutions
- ``batch_last.py``: for all other networks, layers that run on the kernels through autograd
- ``functions.py``: the autograd functions of these layers
"""
