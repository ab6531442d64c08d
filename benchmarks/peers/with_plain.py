"""The work as a plain loop in PyTorch: client after client, then the mean of the weights."""

import copy
import sys

import torch
from work import Clock, clients, network, train

if __name__ == "__main__":
    data, model, clock = clients(), network(), Clock()
    for _ in range(int(sys.argv[1])):
        total = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
        for x, y in data:
            own = copy.deepcopy(model)
            train(own, x, y)
            for name, value in own.state_dict().items():
                total[name] += value / len(data)
        model.load_state_dict(total)
        clock.tick()
    clock.write(sys.argv[2])
