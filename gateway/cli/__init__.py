"""The commands. Their modules import heavy packages only when a command runs."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from gateway import __version__
from gateway.cli import (
    batch,
    cluster,
    keys,
    machine,
    nodes,
    reports,
    serve,
    settings,
    store,
    top,
    up,
    why,
)
from gateway.cli.options import with_flags
from gateway.cli.terminal import (
    CommandFailed,
    HelpCommand,
    HelpGroup,
    UsageError,
    print_config_error,
    print_error,
    usage_message,
)
from gateway.cli.workshop import bench, plan, simulate, tune
from gateway.config.errors import ConfigError

app = typer.Typer(
    name="llama-gateway",
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Every command explains itself: llama-gateway nodes --help\n"
        "Exit status: 0 done, 1 failed, 2 wrong usage or configuration."
    ),
)

for command, examples in (
    (up.up, up.EXAMPLES),
    (serve.serve, serve.SERVE_EXAMPLES),
    (serve.check, serve.CHECK_EXAMPLES),
    (nodes.nodes, nodes.NODES_EXAMPLES),
    (nodes.models, nodes.MODELS_EXAMPLES),
    (why.why, why.EXAMPLES),
    (top.top, top.EXAMPLES),
    (reports.requests, reports.REQUESTS_EXAMPLES),
    (reports.usage, reports.USAGE_EXAMPLES),
    (reports.audit, reports.AUDIT_EXAMPLES),
    (simulate.simulate, simulate.EXAMPLES),
    (plan.plan, plan.EXAMPLES),
    (machine.topology, machine.TOPOLOGY_EXAMPLES),
    (machine.fit, machine.FIT_EXAMPLES),
    (tune.tune, tune.EXAMPLES),
    (bench.bench, bench.EXAMPLES),
):
    app.command(cls=HelpCommand, epilog=examples)(with_flags(command))

app.add_typer(keys.app, name="keys")
app.add_typer(keys.groups, name="groups")
app.add_typer(batch.webhooks, name="webhooks")
app.add_typer(batch.app, name="batch")
app.add_typer(settings.app, name="settings")
app.add_typer(store.app, name="store")
app.add_typer(cluster.app, name="cluster")
app.add_typer(machine.cache, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"llama-gateway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """One OpenAI-compatible address in front of many llama.cpp servers."""


def main() -> NoReturn:
    """Run the command that the arguments name, and end the process with its status."""
    status = 0
    try:
        result = app(prog_name="llama-gateway", standalone_mode=False)
        status = result if isinstance(result, int) else 0
    except UsageError as error:
        status = 2
        message = usage_message(error)
        if message is None:
            print(error.format_message(), file=sys.stderr)
        else:
            print_error(message)
    except typer.Abort:
        print_error("aborted")
        status = 1
    except CommandFailed as error:
        print_error(str(error))
        status = error.status
    except OSError as error:
        words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        is_denied = isinstance(error, PermissionError)
        print_error(f"{words} (use sudo, or be a user who may)" if is_denied else words)
        status = 1
    except ConfigError as error:
        print_config_error(error)
        status = 2
    sys.exit(status)
