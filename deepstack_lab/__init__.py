"""The laboratory: published statements about depth, and the studies that measure them.

It uses deepstack as anybody does, and nothing imports it: `deepstack.base.extensions` finds it.
"""
