"""How updates become bytes: masks, values, and the frame that carries both."""

from fedsift.codec.errors import FrameError
from fedsift.codec.frame import Spec, decode, encode, encoded_size, state_hash
from fedsift.codec.limits import Limits, shape_of
from fedsift.codec.update import Coded, Part, Update, dense, sparse
from fedsift.codec.values import Float, Linear, Log, Sign

__all__ = [
    "Coded",
    "Float",
    "FrameError",
    "Limits",
    "Linear",
    "Log",
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
