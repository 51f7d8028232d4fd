"""Sweeps of a user's own trainer, a command, and the answer to: is my change better?"""
