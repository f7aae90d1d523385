"""Why a local fleet can't start. The text of each names what is wrong and the remedy."""

from __future__ import annotations


class LocalFleetError(Exception):
    """The base of all: its text is for a person, without a traceback."""


class MissingExtraError(LocalFleetError):
    """A package of the `local` extra is not installed."""


class ModelFileError(LocalFleetError):
    """The model file is missing, incomplete or not a GGUF file."""


class MemoryShortError(LocalFleetError):
    """The servers would leave too little memory free."""


class MemoryLockError(LocalFleetError):
    """The model is to be locked in memory, and that is not allowed."""


class ServerBinaryError(LocalFleetError):
    """The llama-server binary can't be run."""


class ServerStartError(LocalFleetError):
    """A server ended, or gave no sign of life, before it was ready."""
