"""seqmix: sequence architectures side by side, on the same data, with the same budget, under one harness.

Axes, as they are written at the end of a line where a tensor is born:

    B  batch            L  length (time)       D  width of the model, or of a mixer's inner stream
    H  heads            P  width of a head     N  state size per channel
    V  vocabulary       W  width of a short convolution
"""
