"""What each architecture costs, measured: `python -m seqmix.bench` (conf/bench.yaml).

grid.py        config -> Points, each a model or a kernel at one shape
point.py       one Point -> numbers, in a process of its own            over seqmix.costs
kernels.py     every implementation of every operator that seqmix_kernels declares (benchmark.py), timed beside its floors
pool.py        Points -> rows, one process at a time; how each ended
results.py     rows -> table, and where one model passes another
figures.py     curves -> SVG
"""
