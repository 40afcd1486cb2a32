"""Sets how OpenMP's threads wait. train.py, the benchmark and the tests import this before torch.

A waiting OpenMP thread spins by default, which takes the core from other processes: another run, a browser, a build.
GOMP_SPINCOUNT=1000 makes a thread of libgomp (PyPI's builds of torch) sleep after some microseconds of spinning.
KMP_BLOCKTIME=0 is the nearest setting of Intel's and LLVM's runtimes (conda's builds, macOS). Each runtime ignores the
other's variable, and reads its own once, when torch loads it. If the user sets one of `POLICIES`, nothing is changed.

Milliseconds per step of the default run on two cores (torch 2.13, libgomp unless another is named), without and with it:

    AMD EPYC, bare loop, alone                           22.9 to 26.4     23.4 to 24.2
    AMD EPYC, bare loop, beside one busy process         66 to 82         46 to 48
    AMD EPYC, bare loop, beside another such run         107 to 118       49 to 52
    Intel Xeon (Sapphire Rapids), train.py, alone        21.4 to 24.5     22.3 to 23.7
    Intel Xeon, bare loop, alone                         21.4 to 25.6     22.8 to 27.6
    Intel Xeon, bare loop, alone, Intel's runtime        22.0 to 22.3     23.3 to 23.6

"Alone" on the Xeon is with real-time priority, beside other work.
"""

import os

POLICIES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")

if not any(name in os.environ for name in POLICIES):
    os.environ |= {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
