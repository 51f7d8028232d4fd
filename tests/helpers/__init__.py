"""Code that several tests share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
QUICK = str(ROOT / "configs" / "quick.yaml")
