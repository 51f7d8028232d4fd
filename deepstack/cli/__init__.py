"""The command line: one file a command."""

from deepstack.cli.app import app, main

__all__ = ["app", "main"]
