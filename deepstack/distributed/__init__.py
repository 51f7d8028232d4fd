"""The ranks that train one model together: their group, and parameters sharded over them."""

from deepstack.distributed.group import ALONE as ALONE
from deepstack.distributed.group import RankGroup as RankGroup
from deepstack.distributed.group import join_ranks as join_ranks
from deepstack.distributed.group import local_rank as local_rank
from deepstack.distributed.group import lost_rank as lost_rank
from deepstack.distributed.group import parallelism as parallelism
from deepstack.distributed.group import started_by_torchrun as started_by_torchrun
from deepstack.distributed.sharded import ShardedBanks as ShardedBanks
from deepstack.distributed.sharded import sharded_norm as sharded_norm
from deepstack.distributed.sharded import sharded_sum as sharded_sum
