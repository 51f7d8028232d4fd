"""Adds `deepstack sweep --ray`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from deepstack.cli import LauncherOption, SweepOrder, option

if TYPE_CHECKING:
    from deepstack.sweeps import Cell, Launcher

clusters = partial(option, panel="Clusters")


class RayOption(LauncherOption):
    """Runs on a Ray cluster."""

    flag, place = "--ray", 1

    ray: bool = clusters(
        "Run on the Ray cluster of this host, of RAY_ADDRESS, or of HOST:PORT in --ray HOST:PORT.",
        "--ray",
        default=False,
    )

    def own_words(self, words: Sequence[str]) -> list[str]:
        self.address = ray_address(words)
        return [] if self.address is None else [self.address]

    def launcher(self, order: SweepOrder, cells: Sequence[Cell]) -> Launcher | None:
        from deepstack.integrations.ray.launcher import OnRay

        return OnRay(order.name, order.out, order.workers, self.address)


def ray_address(words: Sequence[str]) -> str | None:
    """Return the word that is a cluster's address, or None; files and settings never match."""
    return next((word for word in words if re.fullmatch(r"(ray://)?[^=/\s]+:\d+|auto", word)), None)
