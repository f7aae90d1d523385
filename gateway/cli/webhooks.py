"""`llama-gateway webhooks`: secrets with which events of batches and responses are signed."""

from __future__ import annotations

import base64
import secrets

import typer

from gateway.cli.options import examples_epilog
from gateway.cli.terminal import HelpCommand, HelpGroup, print_note

SECRET_BYTES = 32

app = typer.Typer(
    cls=HelpGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Secrets of webhooks, which receive events of batches and responses.",
    epilog=examples_epilog(
        ("llama-gateway webhooks secret > hooks.secret", "a secret for `webhooks.targets`")
    ),
)


@app.callback()
def _root() -> None:
    """Keep `secret` a command of its own, though it is the only one."""


@app.command(
    cls=HelpCommand,
    epilog=examples_epilog(
        ("(umask 077; llama-gateway webhooks secret > hooks.secret)", "for `secret_file`"),
        ("llama-gateway webhooks secret >> hooks.secret", "a second one, while both are in use"),
    ),
)
def secret() -> None:
    """Print a new secret (whsec_...); gateway and receiver must both have it."""
    text = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    print(f"whsec_{text}")
    print_note("Name its file as secret_file of a target in webhooks.targets, and reload.")
