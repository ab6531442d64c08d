"""Shared by all tests: one torch thread a process, and hypothesis without a clock."""

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("fedsift", deadline=None, max_examples=50)
hypothesis.settings.load_profile("fedsift")
