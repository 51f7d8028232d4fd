"""Measurements of a run: the model update at every step, layer diagnostics at selected steps."""

from deepstack.base.extensions import import_extensions
from deepstack.base.registry import import_all
from deepstack.diagnostics.divergence import Culprit as Culprit
from deepstack.diagnostics.divergence import culprit as culprit
from deepstack.diagnostics.instrument import INSTRUMENTS as INSTRUMENTS
from deepstack.diagnostics.instrument import Instrument as Instrument
from deepstack.diagnostics.instrument import Row as Row
from deepstack.diagnostics.instrument import RunState as RunState
from deepstack.diagnostics.instrument import check_instruments as check_instruments
from deepstack.diagnostics.layers import DIAGNOSTICS as DIAGNOSTICS
from deepstack.diagnostics.layers import Diagnostic as Diagnostic
from deepstack.diagnostics.layers import Values as Values
from deepstack.diagnostics.layers import describe as describe
from deepstack.diagnostics.layers import diagnostic as diagnostic
from deepstack.diagnostics.layers import evaluate as evaluate
from deepstack.diagnostics.layers import grad_norm_predicted as grad_norm_predicted
from deepstack.diagnostics.layers import has_plain_norm_and_relu as has_plain_norm_and_relu
from deepstack.diagnostics.snapshot import Snapshot as Snapshot
from deepstack.diagnostics.snapshot import matrices as matrices
from deepstack.diagnostics.snapshot import take as take
from deepstack.diagnostics.spikes import SpikeFinder as SpikeFinder
from deepstack.diagnostics.stream import angular_distance as angular_distance
from deepstack.diagnostics.streams import largest_sums as largest_sums
from deepstack.diagnostics.streams import stream_mixing as stream_mixing
from deepstack.diagnostics.sublayer_statistics import SublayerStatistics as SublayerStatistics
from deepstack.diagnostics.sublayer_statistics import variance as variance
from deepstack.diagnostics.sublayers import beta_ln as beta_ln
from deepstack.diagnostics.sublayers import beta_rc as beta_rc
from deepstack.diagnostics.update import ModelUpdate as ModelUpdate
from deepstack.diagnostics.update import evaluating as evaluating
from deepstack.diagnostics.update import measuring as measuring
from deepstack.diagnostics.update import model_update as model_update
from deepstack.diagnostics.update import token_distance as token_distance

import_all(__name__, __path__)
import_extensions("measure")  # each module registers its diagnostics and instruments
