"""Reproduce the paper's table and figures from pinned configurations."""
