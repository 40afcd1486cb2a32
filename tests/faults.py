"""LSTMs that go wrong at their third training step, for the tests of sweeps; FAULTS=off cures all but Full."""

import os
import signal
import sys

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
