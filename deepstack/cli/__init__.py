"""The command line, with one file for each command."""

from deepstack.base.ending import one_line_endings

with one_line_endings():  # an interrupt or a lack of memory may come during the imports
    from deepstack.cli.app import Command, app, main, reported_errors

__all__ = ["Command", "app", "main", "reported_errors"]
