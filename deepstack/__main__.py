"""`python -m deepstack` is the command line."""

from deepstack.cli import main

main()
