"""`llama-gateway why`: explains where a request went and why, by the admin API."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from gateway.tools.cli import options
from gateway.tools.cli.admin_client import connect_admin
from gateway.tools.cli.explanation import explained
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import console, print_json

EXAMPLES = examples_epilog(
    ("llama-gateway why req_6f0c3a7d12c4b1e95", "by the id in GET /admin/requests"),
    ("llama-gateway why my-request-7", "by the X-Request-ID of its response, or in the log"),
    ("llama-gateway why my-request-7 --json | jq '.requests[0].decisions'", "for scripts"),
)


def why(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The gateway's id of the request, or the X-Request-ID of its response.",
        ),
    ],
    admin_url: options.AdminUrl = None,
    admin_key_file: options.AdminKeyFile = None,
    admin_ca: options.AdminCa = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Explain a request: the nodes that were considered, and what each was expected to take.

    Shows what was chosen and why, what came of it beside the prediction, and of a request that
    waits or was refused the place in the queue or the reason. The running gateway remembers its
    last few thousand decisions, without any text of prompts and responses. Where several requests
    have the same X-Request-ID, the newest is first. Needs the role operator.
    """
    with connect_admin(admin_url, admin_key_file, config, ca=admin_ca) as admin:
        found = admin.request("GET", f"/admin/requests/{quote(request_id, safe='')}/why")
    if as_json:
        print_json(found)
        return
    for part in explained(found):
        if isinstance(part, str):
            print(part)
        else:
            console().print(part)
