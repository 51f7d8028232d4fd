"""The part of ‖ΔF‖ that comes from one role or one range of layers."""
