"""Measures of a run while it trains, one folder each, with their charts.

The core finds them by the names of their files (`deepstack.base.extensions`).
"""
