"""FedAdam-SSM as a Flower baseline, with fedsift as its library."""
