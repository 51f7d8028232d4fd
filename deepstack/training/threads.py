"""The CPU threads of a run: a fixed rule of its shape, because numbers depend on them."""

import os
from dataclasses import dataclass

from deepstack import config as conf
from deepstack.fast import FastPaths
from deepstack.fast.distributed import ALONE, RankGroup

# Below this many multiplications in the largest product of a layer, a second thread costs more
# time than it saves (measured on two cores; see ThreadRule.reserved).
SMALL_PRODUCT = 2**27
# Tokens of a batch below which a further thread of C++ kernels waits longer than it computes.
ROWS_OF_THREAD = 64


@dataclass(frozen=True)
class ThreadRule:
    """The CPU threads of a run, from its shape and its machine.

    setting: runtime.threads.
    shards: number of shards of a batch.
    tokens: number of tokens in a rank's part of a micro-batch.
    width: multiplications per token in the largest product of a layer.
    on_host: number of ranks on this host.
    on_gpu: whether the device is a GPU.
    """

    setting: int | str
    shards: int
    tokens: float
    width: int
    on_host: int
    on_gpu: bool

    @property
    def is_small(self) -> bool:
        """Whether the largest product of a layer is small for a thread of torch."""
        return self.tokens * self.width < SMALL_PRODUCT

    @property
    def reserved(self) -> int:
        """The threads that a run reserves: the configured number, else 1 for small matrices.

        Torch is several times faster by one thread than by two for narrow models on a busy
        machine.  Ranks on one host divide its cores.  Shards of a batch are independent: each takes
        a thread.  A run on a GPU takes one, whatever its width: the products are the GPU's.
        """
        if isinstance(self.setting, int):
            return self.setting
        if self.on_gpu:
            return 1
        if self.shards > 1:
            return min(self.shards, conf.cores())
        return 1 if self.is_small else max(1, conf.cores() // self.on_host)

    def of_run(self, paths: FastPaths) -> int:
        """Return the threads of a run on these fast paths.

        C++ kernels divide small operations too, between all cores by default, at most
        OMP_NUM_THREADS and one for every ROWS_OF_THREAD tokens.  Their numbers do not depend on the
        threads.
        """
        threads = self.reserved
        if not paths.executor or self.setting != "auto" or threads > 1:
            return threads
        given = os.environ.get("OMP_NUM_THREADS", "")
        limit = int(given) if given.isdecimal() else conf.cores()
        return max(1, min(limit, conf.cores(), int(self.tokens) // ROWS_OF_THREAD))

    def of_operation(self, paths: FastPaths | None = None) -> int:
        """Return the threads of one operation of torch, on which numbers may depend.

        One, if threads run shards of a batch, or C++ kernels run all operations that are not small.

        paths: of the run, once they are known.
        """
        by_kernels = paths is not None and bool(paths.executor) and self.is_small
        if self.shards > 1 or by_kernels:
            return 1
        return self.reserved if paths is None else self.of_run(paths)


def thread_rule(
    config: conf.Config, ranks: RankGroup = ALONE, *, on_gpu: bool = False
) -> ThreadRule:
    """Return the rule of a run's threads."""
    sequences = config.train.batch_size / ranks.size / config.train.micro_batches
    return ThreadRule(
        setting=config.runtime.threads,
        shards=config.train.shards,
        tokens=sequences * config.task.seq_len,
        width=config.model.d_model * conf.width_inside(config),
        on_host=ranks.on_host,
        on_gpu=on_gpu,
    )


def choose_threads(config: conf.Config, ranks: RankGroup = ALONE, *, on_gpu: bool = False) -> int:
    """Return the CPU threads that a run reserves, see `ThreadRule`."""
    return thread_rule(config, ranks, on_gpu=on_gpu).reserved
