"""Types of the values in settings and inventory, and how they are read and written."""

from __future__ import annotations

import ast
import contextlib
import inspect
import ipaddress
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

T = TypeVar("T")
# No wait is meant to be longer than a week; a larger figure is a slip of units.
LONGEST_DURATION = 7 * 86400.0

LONGEST_KEPT = 366 * 86400.0
"""Seconds; for how long something may be kept at most."""

LARGEST_SIZE = 1 << 40

LARGEST_MEMORY = 1 << 46
"""Bytes of a host."""


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of a module's classes, each in one line; none: no source.

    The file is that on the disk now, which an upgrade may be writing while an older gateway runs.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, SyntaxError, TypeError, ValueError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for model in tree.body:
        if not isinstance(model, ast.ClassDef):
            continue
        texts = found[model.name] = {}
        for field, below in pairwise(model.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return found


def description_of(model: type[BaseModel], name: str) -> str:
    """What a field means: the docstring below it, for the reference and the schemas."""
    texts = _docstrings(model.__module__).get(model.__name__, {})
    return texts.get(name, "") or model.model_fields[name].description or ""


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Put the meaning of each field into the JSON schema of its model; not what its type says."""
    for name, field in model.model_fields.items():
        text = description_of(model, name)
        for key in {name, field.validation_alias, field.serialization_alias}:
            if key in schema["properties"] and text not in {"", field.annotation.__doc__}:
                schema["properties"][key]["description"] = text


class ConfigModel(BaseModel):
    """A mapping of a configuration file: unknown keys are errors, and `null` means unset.

    The docstring below a field is its description. It is read from the source only when a schema, a
    page or an error needs it: pydantic's `use_attribute_docstrings` takes 50 ms of each start.
    """

    misplaced_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that people write here by mistake, and the remedy."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_by_alias=True,
        validate_by_name=True,
        hide_input_in_errors=True,
        json_schema_extra=_describe,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, data: object) -> object:
        # `queue:` with every line below it commented out reads as null in YAML.
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if value is not None}
        return data


@dataclass(frozen=True, slots=True)
class TypeLabel:
    """A type's name in the reference, and the unit of its numbers."""

    name: str
    unit: str = ""


def validation_error(message: str, remedy: str = "", key: str = "") -> PydanticCustomError:
    """Build the error that a validator raises: what is wrong, and the remedy.

    `key` names the key to blame where it is not the validated one but its neighbour.
    """
    context = {"message": message, "remedy": remedy, "key": key}
    return PydanticCustomError("config", "{message}", context)


def matching(form: Callable[[str], object], message: str, remedy: str = "") -> BeforeValidator:
    """Check that a text has this form. It is never shown: a key may have been pasted here."""

    def check(value: object) -> object:
        if isinstance(value, str) and not form(value):
            raise validation_error(message, remedy)
        return value

    return BeforeValidator(check)


def read_by(parse: Callable[[object], object], message: str, remedy: str) -> BeforeValidator:
    """Read a value by a function that raises ValueError for what can't be read."""

    def read(value: object) -> object:
        try:
            return parse(value)
        except ValueError:
            raise validation_error(message, remedy) from None

    return BeforeValidator(read)


def instead_of(other: str, remedy: str = "keep one of the two") -> AfterValidator:
    """Check that another key, which stands before this one, is not given too."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get(other):
            raise validation_error(f"can't stand beside {other}", remedy)
        return value

    return AfterValidator(check)


def at_least(other: str) -> AfterValidator:
    """Check that a number is not below that of another key, which stands before it."""

    def check(value: float, info: ValidationInfo) -> float:
        if value < info.data.get(other, 0.0):
            raise validation_error(
                f"must not be less than `{other}`", f"raise {info.field_name} or lower {other}"
            )
        return value

    return AfterValidator(check)


def at_most(other: str) -> AfterValidator:
    """Check that a number is not above that of another key, which stands before it."""

    def check(value: float, info: ValidationInfo) -> float:
        if value > info.data.get(other, math.inf):
            raise validation_error(
                f"must not be more than `{other}`", f"lower {info.field_name} or raise {other}"
            )
        return value

    return AfterValidator(check)


def _number(value: object) -> object:
    if isinstance(value, (bool, str)):
        raise validation_error(
            "must be a number", "without quotes" if isinstance(value, str) else ""
        )
    return value


def _off_is_zero(value: object) -> object:
    is_off = value is False or (isinstance(value, str) and value.lower() in {"off", "no", "false"})
    return 0.0 if is_off else value


def as_list(value: object) -> object:
    """Let a single text stand for a list of one."""
    return [value] if isinstance(value, str) else value


def existing_file(value: object, info: ValidationInfo) -> object:
    """Resolve a path against the folder of the file that names it; there it must exist.

    Where no file names it (settings built in code), the path stays as it is.
    """
    path, folder = _resolved(value, info)
    found = folder is None
    with contextlib.suppress(OSError):
        found = found or (path.exists() and not path.is_dir())
    if not found:
        raise validation_error(
            # The path isn't shown: a key may have been pasted here.
            "there is no such file",
            f"create it or correct the path; a relative one starts in {folder}",
        )
    return path


def _resolved(value: object, info: ValidationInfo) -> tuple[Path, Path | None]:
    """A path against the folder of the file that names it, and that folder; None: no file does."""
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise validation_error("must be a path")
    folder = (info.context or {}).get("folder")
    return (Path(value), None) if folder is None else (Path(folder) / value, Path(folder))


def _folder(value: object, info: ValidationInfo) -> object:
    """Resolve a path against the folder of the file that names it; it need not exist."""
    path, folder = _resolved(value, info)
    with contextlib.suppress(OSError):
        if path.exists() and not path.is_dir():
            raise validation_error("is a file", "name a folder; it is made where there is none")
    return path if folder is None else path.absolute()


def _network(value: object) -> object:
    if isinstance(value, (ipaddress.IPv4Network, ipaddress.IPv6Network)):
        return value
    if not isinstance(value, str):
        raise validation_error("must be an address or a network", "such as 127.0.0.1 or 10.0.0.0/8")
    try:
        return ipaddress.ip_network(value.strip())
    except ValueError:
        pass
    try:
        remedy = f"write {ipaddress.ip_network(value.strip(), strict=False)}"
    except ValueError:
        remedy = "such as 127.0.0.1, 10.0.0.0/8 or fd00::/8"
    raise validation_error("must be an address or a network", remedy)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _lower_or_off(value: object) -> object:
    # YAML 1.1 reads `off` as a boolean.
    return "off" if value is False else _lower(value)


_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?")


def is_host(text: str) -> bool:
    """Return whether a text is a host name or an IP address (no port, no brackets)."""
    if _HOST.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


LEAST_USUAL_PORT = 80
"""A lower number at the end of an IPv6 address without brackets is a part of the address."""


def bracketed_ipv6(netloc: str) -> str:
    """Put an IPv6 address, perhaps with a port, into the brackets that it lacks; else empty."""
    if netloc.count(":") < 2 or "[" in netloc:
        return ""
    host, _, port = netloc.rpartition(":")
    if port.isdecimal() and LEAST_USUAL_PORT <= int(port[:6]) <= 65535 and is_host(host):
        return f"[{host}]:{port}"
    return f"[{netloc}]" if is_host(netloc) else ""


_URL_EXAMPLE = "such as http://10.0.0.11:8080"

_WRITTEN_PORT = re.compile(r":([0-9]{1,20})$")

_URL_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")


def normalise_node_url(value: object) -> object:
    """Normalise a node's address: http or https, a host, perhaps a port and a path prefix.

    Scheme and host are lowercased, and the path loses its last slash. No error shows the address:
    it may hold a password.
    """
    if not isinstance(value, str):
        return value
    try:
        parts = urlsplit(value)
        host = parts.hostname or ""
    except ValueError:
        raise validation_error("is no valid URL", _URL_EXAMPLE) from None
    if "@" not in parts.netloc and (bracketed := bracketed_ipv6(parts.netloc)):
        raise validation_error(
            "an IPv6 address needs brackets", f"write {parts.scheme}://{bracketed}{parts.path}"
        )
    try:
        port = parts.port
    except ValueError:
        shown = _WRITTEN_PORT.search(parts.netloc)
        number = f" {shown[1]}" if shown else ""
        raise validation_error(
            f"has a wrong port{number}", f"a port is a number up to 65535, {_URL_EXAMPLE}"
        ) from (None)
    if parts.scheme not in {"http", "https"} or not host:
        raise validation_error("must be an http or https URL with a host", _URL_EXAMPLE)
    if "@" in parts.netloc:
        raise validation_error(
            "must not hold a user or a password",
            "name the node's key by api_key_env or api_key_file",
        )
    if "?" in value or "#" in value:
        raise validation_error(
            "must not have a query or a fragment", "leave out the part from the ? or # on"
        )
    if not is_host(host) or port == 0:
        raise validation_error("must name a valid host and port", _URL_EXAMPLE)
    path = parts.path.rstrip("/")
    if not _URL_PATH.fullmatch(path):
        raise validation_error(
            "has characters in its path that a URL can't have", "percent-encode them"
        )
    if path.endswith("/v1"):
        raise validation_error("must not end in /v1", "leave /v1 out; the gateway adds it")
    bracketed = f"[{host}]" if ":" in host else host
    netloc = bracketed if port is None else f"{bracketed}:{port}"
    return f"{parts.scheme}://{netloc}{path}"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def check_json_value(value: object) -> object:
    """Check that a value can be written as JSON for a node."""
    match value:
        case float() if not math.isfinite(value):
            raise validation_error("must be a finite number")
        case int() if not -(1 << 63) <= value < 1 << 63:
            raise validation_error("must be a number of at most 64 bits")
        case Mapping():
            for item in value.values():
                check_json_value(item)
        case list() | tuple():
            for item in value:
                check_json_value(item)
    return value


_DURATION = re.compile(r"(?:(?:\d+(?:\.\d*)?|\.\d+)\s*(?:ms|s|m|h|d)\s*)+")

_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d)")

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(b|kb|mb|gb|tb|kib|mib|gib|tib)", re.IGNORECASE)

_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}

# A text longer than this is no duration or size, and isn't worth matching.
_LONGEST = 40


def parse_duration(value: object) -> float:
    """Turn a number of seconds or a text such as `30s`, `250ms`, `1h30m` into seconds.

    Raises ValueError for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif isinstance(value, str) and len(value) <= _LONGEST and value.isascii():
        text = value.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        if _DURATION.fullmatch(text):
            parts = _DURATION_PART.findall(text)
            return math.fsum(float(number) * _SECONDS[unit] for number, unit in parts)
    raise ValueError("not a duration")


def parse_timestamp(value: object) -> datetime:
    """Turn a text such as `2027-01-31` or `2027-01-31T18:00:00+01:00` into a time in UTC.

    Without an offset it is UTC. Raises ValueError for anything else.
    """
    if isinstance(value, datetime):
        found = value
    elif isinstance(value, str) and len(value) <= _LONGEST and value.isascii():
        found = datetime.fromisoformat(value.strip())
    else:
        raise ValueError("not a time")
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    try:
        return found.astimezone(UTC)
    except OverflowError:
        raise ValueError("out of range") from None


def parse_size(value: object) -> int:
    """Turn a number of bytes or a text such as `64MiB`, `1 GiB`, `500kB` into bytes.

    Raises ValueError for anything else, a fraction of a byte included.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= _LONGEST and value.isascii():
        text = value.strip()
        if text.isdigit():
            return int(text)
        if found := _SIZE.fullmatch(text):
            size = float(found[1]) * _BYTES[found[2].lower()]
            if size.is_integer():
                return int(size)
    raise ValueError("not a size")


def format_size(size: int) -> str:
    """Write bytes in the largest binary unit that divides them: `64MiB`, `1GiB`, `1000 bytes`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}"


def format_duration(seconds: float) -> str:
    """Write seconds shortly: `15s`, `0.05s`, `5m`, `1h`."""
    for unit, factor in (("h", 3600), ("m", 60)):
        if seconds and seconds % factor == 0:
            return f"{seconds / factor:g}{unit}"
    return f"{seconds:g}s"


_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "number", "minimum": 0},
        {"type": "string", "pattern": r"^\s*([0-9.]+\s*(ms|s|m|h|d)\s*)+$"},
    ]
}

Listed = Annotated[tuple[T, ...], BeforeValidator(as_list)]
"""A list; a single text stands for a list of one."""

PriorityName = Literal["urgent", "premium", "normal", "batch"]

NonEmptyText = Annotated[str, Field(min_length=1, max_length=1024), TypeLabel("text")]

Host = Annotated[
    str,
    matching(is_host, "must be a host name or an IP address", "without a scheme, a path or a port"),
    TypeLabel("host name or address"),
]

_Whole = Annotated[int, BeforeValidator(_number), TypeLabel("number")]

Port = Annotated[_Whole, Field(ge=0, le=65535), TypeLabel("port")]

Count = Annotated[_Whole, Field(ge=1, le=1_000_000_000)]

CountOrZero = Annotated[_Whole, Field(ge=0, le=1_000_000_000)]

Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]

Money = Annotated[Number, Field(ge=0, le=1e9), TypeLabel("amount", "currency")]

Fraction = Annotated[Number, Field(ge=0, le=1), TypeLabel("share, 0 to 1")]

Factor = Annotated[Number, Field(gt=0, le=1e6), TypeLabel("factor")]

_READ_DURATION = read_by(
    parse_duration, "must be a duration", 'seconds such as 30 or 0.5, or "30s", "5m", "1h"'
)

_Duration = Annotated[
    float, _READ_DURATION, WithJsonSchema(_DURATION_SCHEMA), TypeLabel("duration", "s")
]

Seconds = Annotated[_Duration, Field(gt=0, le=LONGEST_DURATION)]

SecondsOrZero = Annotated[_Duration, Field(ge=0, le=LONGEST_DURATION)]

KeptSeconds = Annotated[_Duration, Field(gt=0, le=LONGEST_KEPT)]

SecondsOrOff = Annotated[
    float,
    Field(ge=0, le=LONGEST_DURATION),
    _READ_DURATION,
    BeforeValidator(_off_is_zero),
    WithJsonSchema({"anyOf": [*_DURATION_SCHEMA["anyOf"], {"enum": ["off", False]}]}),
    TypeLabel("duration or `off`", "s"),
]


Timestamp = Annotated[
    datetime,
    read_by(
        parse_timestamp,
        "must be a time",
        "such as 2027-01-31 (its beginning, in UTC) or 2027-01-31T18:00:00Z",
    ),
    WithJsonSchema({"type": "string", "format": "date-time"}),
    TypeLabel("time"),
]

_Size = Annotated[
    int,
    read_by(parse_size, "must be a number of bytes", 'such as 65536, "64KiB", "500kB" or "1GiB"'),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*([kKmMgGtT][iI]?)?[bB]\s*$"},
            ]
        }
    ),
    TypeLabel("size", "bytes"),
]

ByteCount = Annotated[_Size, Field(ge=1, le=LARGEST_SIZE)]

MemorySize = Annotated[_Size, Field(ge=1, le=LARGEST_MEMORY)]

ExistingFile = Annotated[
    Path,
    BeforeValidator(existing_file),
    WithJsonSchema({"type": "string"}),
    TypeLabel("path of a file"),
]

FolderPath = Annotated[
    Path,
    BeforeValidator(_folder),
    WithJsonSchema({"type": "string"}),
    TypeLabel("path of a folder"),
]

Network = Annotated[
    ipaddress.IPv4Network | ipaddress.IPv6Network,
    BeforeValidator(_network),
    WithJsonSchema({"type": "string"}),
    TypeLabel("network"),
]

Networks = Annotated[Listed[Network], TypeLabel("list of networks")]

EnvVarName = Annotated[
    str,
    matching(
        _VARIABLE.fullmatch,
        "must be the name of an environment variable",
        "the name such as NODE_KEY, not the key",
    ),
    TypeLabel("name of a variable"),
]

Lowercased = BeforeValidator(_lower)

LowercasedOrOff = BeforeValidator(_lower_or_off)

JsonMap = Mapping[str, Annotated[Any, BeforeValidator(check_json_value)]]

LONGEST_SECRET = 16384


def secret_from_variable(variable: str, env: Mapping[str, str], key: str) -> str:
    """Read a secret from the environment; raises a validation error that never shows it.

    `key`: the key of the file that names the variable.
    """
    return _checked_secret(text_of_variable(variable, env, key), f"the variable {variable}", key)


def secret_from_file(path: Path, key: str) -> str:
    """Read a secret from a file, without the white space around it; raises a validation error."""
    return _checked_secret(text_of_file(path, key), "the file", key)


def resolved_secret(given: object, info: ValidationInfo, what: str, stem: str) -> object:
    """The secret that `{stem}_env` or `{stem}_file` names, for a field that no file may have.

    `what`: the secret's name in errors. Built in code, the field stays as it is given.
    """
    env = (info.context or {}).get("env")
    if env is None:
        return given
    variable, file = f"{stem}_env", f"{stem}_file"
    if given is not None:
        raise validation_error(
            f"{what} must not stand in this file", f"name it by {variable} or {file}"
        )
    if name := info.data.get(variable):
        return secret_from_variable(name, env, variable)
    if path := info.data.get(file):
        return secret_from_file(path, file)
    return None


def text_of_variable(variable: str, env: Mapping[str, str], key: str) -> str:
    """The value of a variable that holds secrets; raises a validation error that blames `key`."""
    if variable not in env:
        raise validation_error(
            f"the variable {variable} is not set", "set it where the gateway is started", key
        )
    return env[variable]


def text_of_file(path: Path, key: str) -> str:
    """The first 16 KiB of a file that holds secrets, each byte as one character of Latin-1.

    What is not ASCII is refused by those who check it. Raises a validation error that blames `key`.
    """
    try:
        with path.open("rb") as file:
            return file.read(LONGEST_SECRET + 1).decode("latin-1")
    except OSError as error:
        raise validation_error(
            f"can't be read: {error.strerror}", "the gateway's user must be allowed to read it", key
        ) from None


def _checked_secret(text: str, source: str, key: str) -> str:
    secret = text.strip()
    if not secret:
        raise validation_error(f"{source} is empty", "put the node's key there", key)
    if len(secret) >= LONGEST_SECRET or not (secret.isascii() and secret.isprintable()):
        raise validation_error(
            f"{source} holds no key", "a key is one line of printable ASCII characters", key
        )
    return secret
