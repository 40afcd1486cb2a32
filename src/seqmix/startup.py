"""How OpenMP's threads wait, settled before torch is imported: train.py, the benchmark and the tests import this first.

A thread that waits for another spins, which takes the core from whatever runs beside it: another run, a browser, a build.
GOMP_SPINCOUNT=1000 makes a thread of libgomp (PyPI's builds of torch) sleep after some microseconds of spinning, and
KMP_BLOCKTIME=0 is the nearest to it that Intel's and LLVM's runtimes (conda's builds, macOS) have; each runtime ignores the
other's variable, and reads its own once, when torch loads it. Whoever sets one of `POLICIES` decides instead.

Milliseconds per step of the default run as a bare loop on two cores (torch 2.13, libgomp), without and with it:

    alone                                 22.9 to 26.4     23.4 to 24.2     AMD EPYC
    beside one busy process               66 to 82         46 to 48
    beside another run of two threads     107 to 118       49 to 52
    alone                                 21.4 to 25.6     23.1 to 27.6     Intel Xeon (Sapphire Rapids)
    alone, Intel's runtime                22.0 to 22.3     23.3 to 23.6
"""

import os

POLICIES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")

if not any(name in os.environ for name in POLICIES):
    os.environ |= {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
