"""`${VAR}` and `${VAR:-default}` in values; `$$` is a dollar sign."""

import re
from collections.abc import Mapping

# `$$`, a whole reference, or the beginning of one that is not closed.
_DOLLAR = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<inner>[^{}]*)(?P<close>\}?))")
_INNER = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


class InterpolationError(ValueError):
    """A reference that can't be replaced. It never shows the value of a variable."""

    def __init__(self, message: str, remedy: str) -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} ({remedy})")


def is_reference(text: str) -> bool:
    """Tell whether a text is wholly one `${...}`."""
    found = _DOLLAR.fullmatch(text)
    return found is not None and found["inner"] is not None


def interpolate(text: str, env: Mapping[str, str]) -> str:
    """Replace each reference once; what a variable holds is not looked at again.

    `:-` gives the value for a variable that is missing or empty. Raises InterpolationError for
    a missing variable without a default, and for a reference that isn't well formed.
    """

    def replaced(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        reference = _INNER.fullmatch(found["inner"]) if found["close"] else None
        if reference is None:
            raise InterpolationError(
                "a reference that isn't well formed",
                "${NAME} or ${NAME:-default}, not nested; $$ is a dollar sign",
            )
        name, default = reference["name"], reference["default"]
        value = env.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise InterpolationError(
                f"the variable {name} is not set", f"set it, or write ${{{name}:-default}}"
            )
        return value

    return _DOLLAR.sub(replaced, text)
