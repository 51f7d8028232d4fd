"""Databases of trackio from finished runs."""
