"""All clients' samples in one batch, with each client's own parameters in the trainable layers.

- ``gradients.py``: the gradients of all clients from one forward and backward pass
- ``units.py``: the trainable parts of a model, and what replaces their ``forward``
- ``layers.py``: known layers with each client's own parameters
- ``attention.py``: PyTorch's ``MultiheadAttention`` with each client's own parameters
- ``adapters.py``: LoRA adapters on frozen layers
- ``rewrites.py``: faster forms of the modules that Llama and its kin share
- ``norms.py``: layer and RMS normalization
- ``losses.py``: the cross-entropy of large vocabularies
- ``blocks.py``: pre-norm Transformer blocks in few kernels, and ``fused.py``: their pieces
- ``triton.py`` and ``triton_blocks.py``: the kernels, and ``backend.py``: where they can be used
"""
