"""This machine as a fleet: its topology, llama.cpp servers on it, a demo model.

No imports here: the modules that read a topology run on hosts without the gateway's dependencies.
"""


class LocalFleetError(Exception):
    """A local fleet can't start. The text, for people, names the problem and the remedy."""


class ModelFileError(LocalFleetError, ValueError):
    """The model file is missing, incomplete or not a GGUF file."""


class MemoryShortError(LocalFleetError):
    """The servers would leave too little memory free."""


class ServerStartError(LocalFleetError):
    """A server ended, or did not answer, before it was ready."""
