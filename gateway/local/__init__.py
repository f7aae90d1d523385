"""This machine as a fleet: its topology, llama.cpp servers on it, a demo model.

No imports here: the modules that read a topology run on hosts without the gateway's dependencies.
"""


class LocalFleetError(Exception):
    """A local fleet can't start. The text, for people, names the problem and the remedy."""


class MissingExtraError(LocalFleetError):
    """A package of the `local` extra is not installed."""


class ModelFileError(LocalFleetError, ValueError):
    """The model file is missing, incomplete or not a GGUF file."""


class ContextError(LocalFleetError):
    """A longer context was asked for than the model was trained for."""


class MemoryShortError(LocalFleetError):
    """The servers would leave too little memory free."""


class MemoryLockError(LocalFleetError):
    """The limit of locked memory is too low for the model."""


class ServerBinaryError(LocalFleetError):
    """The llama-server binary can't be run."""


class ServerStartError(LocalFleetError):
    """A server ended, or did not answer, before it was ready."""
