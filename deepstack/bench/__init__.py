"""deepstack beside its peers at the same shape: time, memory and the share of matrix products."""

from deepstack.bench.chart import draw_rows, refuse_chart, where
from deepstack.bench.measure import Measured, bench
from deepstack.bench.peers import PEERS, Peer, PeerModel, Shape, peer, shape_of
from deepstack.bench.report import report

__all__ = [
    "PEERS",
    "Measured",
    "Peer",
    "PeerModel",
    "Shape",
    "bench",
    "draw_rows",
    "peer",
    "refuse_chart",
    "report",
    "shape_of",
    "where",
]
