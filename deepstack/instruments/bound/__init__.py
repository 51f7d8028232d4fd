"""The theorem's bound on ‖ΔF‖, and its terms in every layer."""
