"""Residual schemes, one class each; importing this package registers them all."""

from deepstack.base.registry import import_all
from deepstack.schemes import hyper_connections as hyper_connections
from deepstack.schemes.checks import check_norm as check_norm
from deepstack.schemes.checks import check_roles as check_roles
from deepstack.schemes.checks import defined_at as defined_at
from deepstack.schemes.checks import reads_later as reads_later
from deepstack.schemes.norms import NORMS as NORMS
from deepstack.schemes.norms import BatchNorm as BatchNorm
from deepstack.schemes.norms import LayerNorm as LayerNorm
from deepstack.schemes.norms import StackNorm as StackNorm
from deepstack.schemes.norms import Statistics as Statistics
from deepstack.schemes.parts import FAMILIES as FAMILIES
from deepstack.schemes.parts import Parts as Parts
from deepstack.schemes.parts import Place as Place
from deepstack.schemes.parts import StackPosition as StackPosition
from deepstack.schemes.role import has_role as has_role
from deepstack.schemes.role import parameter as parameter
from deepstack.schemes.role import with_storage as with_storage
from deepstack.schemes.scheme import SCHEMES as SCHEMES
from deepstack.schemes.scheme import Norm as Norm
from deepstack.schemes.scheme import Optim as Optim
from deepstack.schemes.scheme import Scheme as Scheme
from deepstack.schemes.scheme import Stream as Stream
from deepstack.schemes.scheme import Sublayer as Sublayer
from deepstack.schemes.scheme import visible as visible
from deepstack.schemes.stack_scheme import StackScheme as StackScheme
from deepstack.schemes.stack_scheme import scheme_flops as scheme_flops
from deepstack.schemes.stack_scheme import scheme_memory as scheme_memory
from deepstack.schemes.stack_scheme import scheme_options as scheme_options
from deepstack.schemes.stack_scheme import stack_positions as stack_positions
from deepstack.schemes.stack_scheme import stack_schemes as stack_schemes
from deepstack.schemes.tap import Tap as Tap
from deepstack.schemes.tap import tapped as tapped

import_all(__name__, __path__)
