"""pytorchapp: a Flower app for PyTorch, in the form of Flower's own quickstart."""
