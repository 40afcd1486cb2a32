"""LSTMs that go wrong at their third training step, for the tests of sweeps; FAULTS=off cures all but Full."""

import os
import signal
import sys
import time

import torch

from seqmix.mixers.lstm import LSTM


class Faulty(LSTM):
    steps = 0

    def forward(self, x):
        self.steps += self.training
        if self.training and self.steps == 3 and os.environ.get("FAULTS") != "off":
            self.fault(x)
        return super().forward(x)


class Killed(Faulty):
    def fault(self, x):
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Faulty):
    def fault(self, x):
        sys.exit(3)


class Full(LSTM):
    """Has memory for two rows."""

    def forward(self, x):
        if self.training and len(x) > 2:
            raise torch.OutOfMemoryError(f"tried to allocate for {len(x)} rows")
        return super().forward(x)


class BadKernel(Faulty):
    """On a GPU: a kernel reads where nothing is, which ends every process that shares the GPU under MPS."""

    def fault(self, x):
        if x.is_cuda:
            x.new_zeros(4)[torch.full((1,), 2**30, device=x.device)]
            torch.cuda.synchronize()


class Fated(Faulty):
    """What happens is decided by the run's seed; late enough that jobs beside it are training."""

    def fault(self, x):
        kind = {3: "kill", 7: "memory", 11: "kernel"}.get(torch.initial_seed())
        if kind:
            time.sleep(4)
        if kind == "kill":
            Killed.fault(self, x)
        elif kind == "memory":
            torch.empty(2**50, dtype=torch.int8, device=x.device)
        elif kind == "kernel":
            BadKernel.fault(self, x)
