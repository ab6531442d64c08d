"""Secure aggregation: the server learns the sum of the clients' values, and no client's values.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (CCS 2017), on the sparse graph of Bell et al., "Secure Single-Server Aggregation
with (Poly)Logarithmic Overhead" (CCS 2020), with keys that last for a run. See "What does the
server see?" in the documentation.

=============== ================================================================================
primitives.py   key agreement, key derivation, encryption, signatures, Shamir shares, masks: all
                from the libraries cryptography and pycryptodome
integers.py     integers modulo 2**b, and how they are packed
graph.py        who masks with whom, and how many must agree
group.py        the clients of a round, and what they must agree on
messages.py     the messages' bytes
client.py       the client's side: what it reveals, and what it refuses
attempt.py      what the server knows of clients, and of an attempt to sum their values
server.py       the server's side: who is in the sum, and how the masks are removed
storage.py      a client as JSON
exchange.py     a whole round of it in one process, with losses at any stage and byte counts
settings.py     how many neighbors and signatures are needed, and what can be summed
hashing.py      hashes of lists of fields
refusal.py      the errors
=============== ================================================================================
"""

from fedsift.privacy.secure.refusal import Refusal, SecureSumStopped
from fedsift.privacy.secure.settings import SecureSettings

__all__ = ["Refusal", "SecureSettings", "SecureSumStopped"]
