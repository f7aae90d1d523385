"""Settings of metrics and traces."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from gateway.config.fields import (
    ConfigModel,
    EnvVarName,
    ExistingFile,
    Fraction,
    NonEmptyText,
    Seconds,
    TypeLabel,
    instead_of,
    resolved_secret,
    validation_error,
)
from gateway.config.stored import WebhookUrl

TRACES_PATH = "/v1/traces"
"""Where collectors take traces by OTLP over HTTP."""

_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}):[ \t]*([ -~]+)")


def _endpoint(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        url = WebhookUrl.parse(value)
    except ValueError as error:
        raise validation_error(str(error), f"such as http://127.0.0.1:4318{TRACES_PATH}") from None
    if url.query:
        raise validation_error("must have no query", "a secret belongs into header_file")
    return f"{url.origin}{TRACES_PATH}" if url.path == "/" else str(url)


def _rate(value: object) -> object:
    if isinstance(value, (bool, str)):
        raise validation_error("must be a number", "such as 1 or 0.1, for each second")
    return value


class TracesSettings(ConfigModel):
    """Traces of requests, exported by OTLP over HTTP. Never a prompt or a completion."""

    endpoint: Annotated[str | None, BeforeValidator(_endpoint), TypeLabel("URL")] = None
    """URL of the collector, such as `http://127.0.0.1:4318/v1/traces`; without a path `/v1/traces`
    is meant. Unset: no traces. Needs the extra `otel`."""
    share: Fraction = 0.05
    """Share of requests that are traced."""
    beyond_share: Annotated[
        float,
        BeforeValidator(_rate),
        Field(ge=0, le=1000, allow_inf_nan=False),
        TypeLabel("requests a second"),
    ] = 1.0
    """Requests a second that are traced beyond the share: so many whose client has recorded its
    part of the trace (`traceparent`), and as many that the gateway or a node failed (5xx)."""
    service_name: NonEmptyText = "llama-gateway"
    """The gateway's `service.name` in its traces."""
    header_env: EnvVarName | None = None
    """Name of the environment variable that holds a header for the collector, written as
    `Authorization: Bearer SECRET`."""
    header_file: Annotated[ExistingFile | None, instead_of("header_env")] = None
    """File that holds the header, instead of `header_env`."""
    ca_file: ExistingFile | None = None
    """PEM file of the certificate authorities to trust, instead of the system's."""
    timeout: Annotated[Seconds, Field(le=60)] = 10.0
    """For one message to the collector, with all its retries."""
    # Resolved from `header_env` or `header_file`; `exclude` keeps it out of the file's keys.
    header: SecretStr | None = Field(default=None, exclude=True, validate_default=True, repr=False)

    @field_validator("header", mode="before")
    @classmethod
    def _resolve_header(cls, header: object, info: ValidationInfo) -> object:
        found = resolved_secret(header, info, "a header", "header")
        if info.context and isinstance(found, str) and not _HEADER.fullmatch(found):
            raise validation_error(
                "holds no header",
                "it is written as `Authorization: Bearer SECRET`",
                "header_env" if info.data.get("header_env") else "header_file",
            )
        return found

    def header_fields(self) -> dict[str, str]:
        """The header for the collector; empty: there is none."""
        if self.header is None:
            return {}
        name, _, value = self.header.get_secret_value().partition(":")
        return {name: value.strip()}


class TelemetrySettings(ConfigModel):
    """What the gateway tells monitoring. Never a prompt or a completion."""

    gen_ai_metrics: bool = False
    """Requests in `/metrics` also under the names of OpenTelemetry's conventions for generative AI
    (`gen_ai_server_request_duration_seconds` and so on)."""
    key_names: bool = True
    """`llama_gateway_key_info` in `/metrics`: the name of each API key that sends requests beside
    its id, of 1,000 at most, for whoever may know callers: without admin keys, or from the role
    operator on."""
    node_metrics: bool = True
    """Serve `/metrics/nodes`: the metrics of all llama.cpp servers, each with its node's name."""
    traces: TracesSettings = TracesSettings()
    """Traces of requests, for a collector of OpenTelemetry."""
