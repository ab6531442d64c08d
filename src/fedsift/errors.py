"""What can go wrong for reasons that a user can mend; the command line prints each in one line."""


class ConfigError(ValueError):
    """A setting, a file or a folder that the user gave is wrong; the message says how to fix it."""


class Diverged(RuntimeError):
    """Training produced a value that is not finite."""


class TooFewClients(RuntimeError):
    """A round received fewer valid updates than the federation accepts."""


class WorkerDied(RuntimeError):
    """A process of an engine ended unexpectedly."""
