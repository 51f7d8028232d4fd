"""The command line as a program: `python -m deepstack`, and the runs of a sweep."""

from deepstack.cli import main

if __name__ == "__main__":
    main()
