"""Sweeps on a Ray cluster."""
