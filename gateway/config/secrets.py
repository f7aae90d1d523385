"""The key that a node asks for: read from a variable or a file, never shown."""

from collections.abc import Mapping
from pathlib import Path

from gateway.config.fields import validation_error

LONGEST_NODE_KEY = 16384


def key_from_variable(variable: str, env: Mapping[str, str], key: str = "api_key_env") -> str:
    """Take a key from the environment; raises a validation error that names the variable.

    `key`: the one of the file that is to blame.
    """
    if variable not in env:
        raise validation_error(
            f"the variable {variable} is not set",
            "set it where the gateway is started",
            key,
        )
    return _checked(env[variable], f"the variable {variable}", key)


def key_from_file(path: Path, key: str = "api_key_file") -> str:
    """Take a key from a file, without white space around it; bounded."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_NODE_KEY + 1)
    except OSError as error:
        raise validation_error(
            f"can't be read: {error.strerror}",
            "the gateway's user must be allowed to read it",
            key,
        ) from None
    # Latin-1 maps each byte to a character, so what isn't ASCII is told below.
    return _checked(content.decode("latin-1"), "the file", key)


def _checked(text: str, source: str, key: str) -> str:
    secret = text.strip()
    if not secret:
        raise validation_error(f"{source} is empty", "put the node's key there", key)
    if len(secret) >= LONGEST_NODE_KEY or not (secret.isascii() and secret.isprintable()):
        raise validation_error(
            f"{source} holds no key", "a key is one line of printable ASCII characters", key
        )
    return secret
