"""Settings of metrics."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.fields import ConfigModel, TypeLabel


class TelemetrySettings(ConfigModel):
    """What the gateway tells monitoring. Never a prompt or a completion."""

    gen_ai_metrics: Annotated[
        bool,
        Field(
            description=(
                "Requests in `/metrics` also under the names of OpenTelemetry's conventions for "
                "generative AI (`gen_ai_server_request_duration_seconds` and so on)."
            )
        ),
        TypeLabel("true or false"),
    ] = False
    node_metrics: Annotated[
        bool,
        Field(
            description=(
                "Serve `/metrics/nodes`: the metrics of all llama.cpp servers, each with its "
                "node's name."
            )
        ),
        TypeLabel("true or false"),
    ] = True
