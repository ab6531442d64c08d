"""Flower's FedAvg and fedsift's methods on the same model and data."""
