"""A federation whose clients misbehave on demand; see faulty.client."""
