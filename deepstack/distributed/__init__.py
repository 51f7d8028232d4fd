"""Several processes that train one model: their group, and parameters sharded over them."""

from deepstack.distributed.group import Processes, join, local_rank, lost, started_by_torchrun
from deepstack.distributed.sharded import ShardedBank, ShardedBanks, sharded_norm, sharded_sum

__all__ = [
    "Processes",
    "ShardedBank",
    "ShardedBanks",
    "join",
    "local_rank",
    "lost",
    "sharded_norm",
    "sharded_sum",
    "started_by_torchrun",
]
