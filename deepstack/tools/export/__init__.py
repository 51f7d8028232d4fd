"""Weights and logs of runs in the formats of others."""
