"""The ranks that train one model together: their group, and parameters sharded over them."""

from deepstack.distributed.group import (
    ALONE,
    RankGroup,
    join_ranks,
    local_rank,
    lost_rank,
    parallelism,
    started_by_torchrun,
)
from deepstack.distributed.sharded import ShardedBank, ShardedBanks, sharded_norm, sharded_sum

__all__ = [
    "ALONE",
    "RankGroup",
    "ShardedBank",
    "ShardedBanks",
    "join_ranks",
    "local_rank",
    "lost_rank",
    "parallelism",
    "sharded_norm",
    "sharded_sum",
    "started_by_torchrun",
]
