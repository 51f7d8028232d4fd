"""The part of ‖ΔF‖ that comes from one role or one range of layers.

Question: Which roles and layers move the function?
Asked in: experiments/where_the_update_comes_from/README.md
"""
