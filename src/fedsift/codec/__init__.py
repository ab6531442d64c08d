"""The codec: how updates become bytes and back.

Frames
    ``frame.py`` encodes and decodes a frame. ``header.py`` is its header, ``limits.py`` what a
    receiver expects of it, ``inspect.py`` a summary of its contents. ``update.py`` holds an update
    before encoding and after decoding; ``wire.py`` decides whether simulated messages are encoded.

Values
    ``value_coder.py`` is the interface of a value coder. ``values.py`` holds Float, Sign, Bit and
    the registry of all coders, ``value_blocks.py`` holds Linear, Log and Integer,
    ``value_entropy.py`` the entropy coding of their codes, ``value_means.py`` holds Means.

Masks
    ``index.py`` holds the interface of an index coder, Bitmap, Packed and Entropy.
    ``index_gaps.py`` is the model behind Entropy, ``index_sizes.py`` its size without encoding.

Shared
    ``bit_packing.py``, ``range_coder.py``, ``errors.py``; ``native.py`` calls ``kernels.c``;
    ``threads.py`` uses all cores; ``gpu_sizes.py`` and its kernels in
    ``triton.py`` compute sizes on a GPU.

To add a value coder: implement ``ValueCoder`` next to Float and Sign in ``values.py``, add it to
``VALUE_CODERS`` and ``from_wire_id``, describe its bytes in ``docs/reference/frame.md``, and add a
frame to ``tests/codec/make_vectors.py``. The tests in ``tests/codec/test_values.py`` then cover it.
"""

from fedsift.codec.errors import FrameError
from fedsift.codec.frame import Spec, decode, encode, encoded_size, state_hash
from fedsift.codec.limits import Limits, shape_of
from fedsift.codec.update import CodedValues, Part, Update, dense, sparse
from fedsift.codec.values import Bit, Float, Integer, Linear, Log, Means, Sign

__all__ = [
    "Bit",
    "CodedValues",
    "Float",
    "FrameError",
    "Integer",
    "Limits",
    "Linear",
    "Log",
    "Means",
    "Part",
    "Sign",
    "Spec",
    "Update",
    "decode",
    "dense",
    "encode",
    "encoded_size",
    "shape_of",
    "sparse",
    "state_hash",
]
