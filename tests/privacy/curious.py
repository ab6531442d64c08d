"""A curious server: everything that follows from the messages it has received.

Every masked vector is y_u = x_u + self mask + Σ ± pairwise masks, with one unknown per value and
one per mask. The server knows a mask if its key appears in a message, or in anything that it can
decrypt or restore. A combination of values is exposed if some combination of the y and of the known
masks gives it. The rank of a matrix decides that for all combinations at once.
"""

from itertools import combinations

import numpy as np

from fedsift.privacy.secure import Refusal
from fedsift.privacy.secure.client import self_mask_key
from fedsift.privacy.secure.messages import SecureStage
from fedsift.privacy.secure.primitives import combine_shares, derive, unseal
from privacy.parties import RUN, Parties


class CuriousServer:
    """Holds every reply. It asks the clients for the truth only to tell what a key is for.

    ``masked`` lists the masked vectors: by client, round and attempt, whom the client masked with.
    """

    def __init__(self, parties: Parties) -> None:
        self.parties, self.clients = parties, parties.clients
        self.masked: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.masters: dict[tuple[int, int], bytes] = {}
        self.thresholds: dict[tuple[int, int], int] = {}
        self.shares: dict[tuple[int, int], dict[int, bytes]] = {}
        self.generation: dict[tuple[int, int, int], int] = {}
        self.terms: dict[tuple[int, int, int], bytes] = {}
        self.views: set[bytes] = set()
        parties.after = self.note

    @property
    def replies(self) -> list[bytes]:
        return [reply for replies in self.parties.received.values() for reply in replies]

    def note(self, stage: SecureStage, u: int) -> None:
        """Take down what a client has just done: whom it masked with, what it signed."""
        client = self.clients[u]
        now = client.current
        if stage is SecureStage.MASKED:
            partners = tuple(v for v in client.group.neighbors if v in now.cohort)
            self.masked[u, now.round, now.attempt] = partners
            self.generation[u, now.round, now.attempt] = client.generation
            self.terms[u, now.round, now.attempt] = now.terms
            self.masters[u, client.generation] = client.master
            self.thresholds[u, client.generation] = client.group.settings.threshold
            for v, peer in client.peers.items():
                neighbors = self.clients[v].group.neighbors
                if u in neighbors and peer.generation == self.clients[v].generation:
                    shares = self.shares.setdefault((v, peer.generation), {})
                    shares.setdefault(neighbors.index(u) + 1, peer.share)
        if stage is SecureStage.CONSENT:
            self.views.add(client._view())

    def known_keys(self) -> set[bytes]:
        """Every key of a mask that the server can get at, by repeating all it can do."""
        plain, candidates = b"|".join(self.replies), self._all_keys()
        known: set[bytes] = set()
        while True:
            found = known | {key for key in candidates if key in plain} | self._restored(plain)
            if found == known:
                return known
            plain = b"|".join([plain, *self._opened_deposits(found - known)])
            known = found

    def self_key(self, u: int, round: int, attempt: int) -> bytes:
        master = self.masters[u, self.generation[u, round, attempt]]
        return self_mask_key(master, RUN, u, round, attempt)

    def pair_key(self, u: int, v: int, round: int, attempt: int) -> bytes:
        """The key of u's mask with v. That of v is another one if they were told other terms."""
        low, high = sorted((u, v))
        terms = self.terms[u, round, attempt]
        return derive(self.clients[u].peers[v].secret, "pair", low, high, terms)

    def _all_keys(self) -> set[bytes]:
        found = set()
        for (u, round, attempt), partners in self.masked.items():
            found.add(self.self_key(u, round, attempt))
            found.update(self.pair_key(u, v, round, attempt) for v in partners)
        return found

    def _restored(self, plain: bytes) -> set[bytes]:
        """Self keys of masters of which the server has a threshold of shares."""
        found = set()
        for (u, generation), shares in self.shares.items():
            received = {at: share for at, share in shares.items() if share and share in plain}
            least = self.thresholds.get((u, generation), len(self.clients))
            if len(received) >= least:
                master = combine_shares(dict(sorted(received.items())[:least]))
                assert master == self.masters[u, generation]
                masked = [when for when in self.masked if when[0] == u]
                found |= {self_mask_key(master, RUN, *when) for when in masked}
        return found

    def _opened_deposits(self, keys: set[bytes]) -> list[bytes]:
        consents = [r for r in self.replies if r[0] == SecureStage.CONSENT and len(r) > 3 + 64]
        opened = []
        for key in keys:
            for reply in consents:
                for view in self.views:
                    try:
                        opened.append(unseal(derive(key, "deposit"), reply[3 + 64 :], view))
                    except Refusal:
                        continue
        return opened

    def exposed(self, round: int) -> np.ndarray:
        """A basis of the combinations of clients' values that the server can compute."""
        known = self.known_keys()
        rows, columns = [], dict[bytes, int]()
        for (u, r, attempt), partners in self.masked.items():
            if r != round:
                continue
            row = {self.self_key(u, r, attempt): 1}
            row |= {self.pair_key(u, v, r, attempt): 1 if v > u else -1 for v in partners}
            rows.append((u, {key: sign for key, sign in row.items() if key not in known}))
            columns |= dict.fromkeys(rows[-1][1], 0)
        columns = {key: at for at, key in enumerate(columns)}
        values, masks = (
            np.zeros((len(rows), len(self.clients))),
            np.zeros((len(rows), len(columns))),
        )
        for at, (u, row) in enumerate(rows):
            values[at, u] = 1
            for key, sign in row.items():
                masks[at, columns[key]] = sign
        return row_basis(left_null_space(masks) @ values)


def left_null_space(matrix: np.ndarray) -> np.ndarray:
    """Combinations of rows that are zero."""
    u, s, _ = np.linalg.svd(matrix, full_matrices=True)
    rank = int((s > 1e-9).sum())
    return u[:, rank:].T


def row_basis(matrix: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the rows' span."""
    _, s, v = np.linalg.svd(matrix, full_matrices=False)
    return v[s > 1e-9]


def smallest_exposed_sum(basis: np.ndarray) -> int:
    """The fewest clients on whose values alone something that the server can compute depends."""
    clients = basis.shape[1]
    if not len(basis):
        return clients + 1
    for size in range(1, clients + 1):
        for hidden in combinations(range(clients), clients - size):
            if np.linalg.matrix_rank(basis[:, list(hidden)], tol=1e-7) < len(basis):
                return size
    return clients + 1
