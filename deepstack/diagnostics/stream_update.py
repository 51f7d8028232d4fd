"""The change of the stream since initialisation, at every layer boundary."""

from collections.abc import Mapping

from torch import Tensor

from deepstack.config.instruments import SNAPSHOTS
from deepstack.diagnostics.instrument import Instrument, RunState
from deepstack.diagnostics.layers import Values, diagnostic
from deepstack.diagnostics.snapshot import Snapshot, stream_states
from deepstack.diagnostics.update import token_distance


class StreamUpdate(Instrument, name="stream_update"):
    """Adds the stream at θ_0 to snapshots: (depth + 1, batch, seq, d)."""

    every = SNAPSHOTS
    switch = "stream_update"
    adds = "initial_states"

    def begin(self, state: RunState) -> None:
        self.initial = stream_states(state.model, state.inputs)

    def of_layers(self, state: RunState) -> Mapping[str, Tensor]:
        return self.initial


@diagnostic("stream_update", "‖x_l,t − x_l,0‖", parts=())
def stream_update(snapshot: Snapshot) -> Values:
    """Mean over probe tokens of ‖x_l,t − x_l,0‖₂, the change of the stream (log.stream_update)."""
    initial = snapshot.added.get("initial_states")
    if initial is None:
        return {}
    moved = snapshot.states[1:] - initial[1:]
    return token_distance(moved, kept=1)
