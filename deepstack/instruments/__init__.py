"""Measurements, analyses, charts and commands beyond the core, one folder each.

The core finds them by the names of their files (`deepstack.base.extensions`)."""
