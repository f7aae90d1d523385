"""`llama-gateway serve`: the gateway in the foreground."""

from __future__ import annotations

import typer

from gateway.tools.cli import options
from gateway.tools.cli.options import examples_epilog
from gateway.tools.cli.terminal import CommandFailed

EXAMPLES = examples_epilog(
    ("llama-gateway serve", "config/nodes.yaml and config/gateway.yaml, on 127.0.0.1:8000"),
    ("llama-gateway serve --nodes fleet.yaml --port 9000", "another inventory, another port"),
    (
        "llama-gateway serve --host 0.0.0.0 --allow-anonymous",
        "for everybody who can reach this machine, without keys",
    ),
)


def serve(
    nodes: options.NodesFile = options.DEFAULT_NODES,
    config: options.ConfigFile = None,
    host: options.Host = None,
    port: options.Port = None,
    admin_host: options.AdminHost = None,
    admin_port: options.AdminPort = None,
    admin_key_file: options.AdminKeyFile = None,
    allow_anonymous: options.AllowAnonymous = False,
) -> None:
    """Run the gateway over the nodes of the inventory, in the foreground.

    Both files are read again when they change and on SIGHUP. SIGTERM ends it: what runs may finish
    within `shutdown.grace`; a second one ends it at once. SIGUSR2 starts the same command
    anew, perhaps of a newer version, which takes over without a refused connection.
    """
    from gateway.handover import restart_command
    from gateway.process import run
    from gateway.startup import Options, StartError

    given = Options(
        inventory_file=nodes,
        settings_file=options.settings_file(config),
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        allow_anonymous=allow_anonymous,
        admin_key_file=admin_key_file,
        restart_command=restart_command(),
    )
    try:
        status = run(given)
    except StartError as error:
        raise CommandFailed(str(error), error.status) from None
    raise typer.Exit(status)
