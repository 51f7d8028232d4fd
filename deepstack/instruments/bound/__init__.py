"""The theorem's bound on ‖ΔF‖, and its terms in every layer.

Question: How tight is the theorem's bound?  Asked in: experiments/bound_against_measured/README.md
"""
