"""The work in fedsift, with all that FedAdam-SSM adds: masks, frames and their exact sizes."""

import sys

from work import BATCH, LR, STEPS, Clock, clients, network

import fedsift

if __name__ == "__main__":
    data, clock = clients(), Clock()
    method = fedsift.algorithms.fedadam_ssm(local_steps=STEPS, lr=LR)
    fedsift.simulate(
        network(),
        data,
        algorithm=method,
        rounds=int(sys.argv[1]),
        batch_size=BATCH,
        on_round=lambda record: clock.tick(),
    )
    clock.write(sys.argv[2])
