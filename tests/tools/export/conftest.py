"""Fixtures that these tests share with others."""

from helpers.tracked_runs import runs as runs
