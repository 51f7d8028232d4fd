"""deepstack beside its peers at the same shape: time, memory and the share of matrix products."""

from benchmarks.peers import jax_peer  # noqa: F401, registers its peer
from benchmarks.peers.measure import bench
from benchmarks.peers.peers import PEERS, Peer, PeerModel, PeerTrainer, Shape, peer, shape_of
from benchmarks.peers.report import draw_rows, refuse_chart, report, where
from benchmarks.peers.suite import run_suite, shape_config

__all__ = [
    "PEERS",
    "Peer",
    "PeerModel",
    "PeerTrainer",
    "Shape",
    "bench",
    "draw_rows",
    "peer",
    "refuse_chart",
    "report",
    "run_suite",
    "shape_config",
    "shape_of",
    "where",
]
