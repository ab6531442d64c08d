"""fedsift on Flower: a small CNN on handwritten digits."""
