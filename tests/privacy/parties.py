"""Clients and a server of secure aggregation in one process, and a record of all their messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedsift.privacy.secure import Refusal, SecureSettings
from fedsift.privacy.secure.client import SecureClient
from fedsift.privacy.secure.exchange import StageBytes, reply_of, run_exchange
from fedsift.privacy.secure.messages import SecureStage
from fedsift.privacy.secure.server import Replies, Request, SecureServer, SecureSum

RUN = b"test run"
LARGEST = 7


@dataclass
class Parties:
    """``lost`` gives, by client, the first stage at which it no longer replies."""

    weights: Mapping[int, int]
    settings: SecureSettings = field(default_factory=SecureSettings)
    lost: Mapping[int, SecureStage] = field(default_factory=dict)
    lost_replies: frozenset[int] = frozenset()
    received: dict[tuple[SecureStage, int], list[bytes]] = field(default_factory=dict)
    alter: Callable[[SecureStage, int, bytes], bytes] = lambda stage, client, reply: reply
    after: Callable[[SecureStage, int], None] = lambda stage, client: None

    def __post_init__(self) -> None:
        self.server = SecureServer(RUN, self.settings)
        self.clients = {
            u: SecureClient(RUN, u, weight, self.settings) for u, weight in self.weights.items()
        }
        self.refusals: list[tuple[SecureStage, int, str]] = []

    def sum_round(
        self, round: int, codes: Mapping[int, np.ndarray]
    ) -> tuple[SecureSum, StageBytes]:
        """Run a round; every reply is recorded, also those of ``lost_replies``."""

        def answer(stage: SecureStage, u: int, request: bytes) -> bytes | None:
            is_lost = u in self.lost and stage >= self.lost[u]
            if is_lost and u not in self.lost_replies:
                return None
            try:
                reply = reply_of(self.clients[u], stage, request, lambda: codes[u])
            except Refusal as problem:
                self.refusals.append((stage, u, str(problem)))
                return None
            self.received.setdefault((stage, u), []).append(reply)
            self.after(stage, u)
            return None if is_lost else self.alter(stage, u, reply)

        def ask(request: Request) -> Replies:
            answers = {u: answer(request.stage, u, m) for u, m in request.messages.items()}
            return {u: reply for u, reply in answers.items() if reply is not None}

        n = len(next(iter(codes.values())))
        sizes = StageBytes()
        server, clients = self.server, sorted(codes)
        return run_exchange(server, round, clients, n, LARGEST, ask, sizes), sizes


def weighted_sum(codes: Mapping[int, np.ndarray], weights: Mapping[int, int]) -> np.ndarray:
    """The sum in the clear, over the clients in ``weights``."""
    return sum(weight * codes[u] for u, weight in weights.items())


def random_codes(clients: int, n: int = 12, seed: int = 0) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {u: draw.integers(-LARGEST, LARGEST + 1, n) for u in range(clients)}
