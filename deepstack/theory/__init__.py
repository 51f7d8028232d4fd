"""The claims of the documents that deepstack grew from, each a small measured experiment."""

from importlib import import_module

from deepstack.theory.claim import CLAIMS, Claim, Curves, Finding, Line, Part, claim

ROOMS: tuple[str, ...] = ()

for _name in ROOMS:
    import_module(f"deepstack.theory.{_name}")

__all__ = ["CLAIMS", "Claim", "Curves", "Finding", "Line", "Part", "claim"]
