"""Engines that spread a cohort over processes, and the messages between them."""
