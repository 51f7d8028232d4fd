"""What makes a deep stack fast: parameters stacked by role, and the training step."""

from deepstack.speed.banks import Bank, Banks, global_norm, layer_norms
from deepstack.speed.capture import Again, capture
from deepstack.speed.choose import FEW_STEPS, Choice, Ways, choose_ways
from deepstack.speed.gpu.available import makes_kernels
from deepstack.speed.gpu.nodes import attention_on, heads_fit, in_turn, product_on
from deepstack.speed.gpu.norm import AfterSum, after_sum
from deepstack.speed.layers import (
    Through,
    compiled,
    in_parts,
    innermost,
    recomputing,
    run_fused,
    run_layers,
)
from deepstack.speed.muon import Muon
from deepstack.speed.nodes import OPERATIONS, Chain, Product
from deepstack.speed.parallel import Processes, join, local_rank, lost, started_by_torchrun
from deepstack.speed.parameter import RoleParameter, parameter, with_storage
from deepstack.speed.replay import replaying
from deepstack.speed.sharded import ShardedBank, ShardedBanks, sharded_norm, sharded_sum
from deepstack.speed.step import (
    Made,
    Measured,
    Probe,
    Step,
    Update,
    make_step,
    probed,
)

__all__ = [
    "FEW_STEPS",
    "OPERATIONS",
    "AfterSum",
    "Again",
    "Bank",
    "Banks",
    "Chain",
    "Choice",
    "Made",
    "Measured",
    "Muon",
    "Probe",
    "Processes",
    "Product",
    "RoleParameter",
    "ShardedBank",
    "ShardedBanks",
    "Step",
    "Through",
    "Update",
    "Ways",
    "after_sum",
    "attention_on",
    "capture",
    "choose_ways",
    "compiled",
    "global_norm",
    "heads_fit",
    "in_parts",
    "in_turn",
    "innermost",
    "join",
    "layer_norms",
    "local_rank",
    "lost",
    "make_step",
    "makes_kernels",
    "parameter",
    "probed",
    "product_on",
    "recomputing",
    "replaying",
    "run_fused",
    "run_layers",
    "sharded_norm",
    "sharded_sum",
    "started_by_torchrun",
    "with_storage",
]
