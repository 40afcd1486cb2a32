"""One process of two that train S4 and S4D by DDP over gloo: python tests/ddp_s4.py RANK FILE. Prints its weights, hashed."""

import gc
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from seqmix.mixers.s4 import S4
from seqmix.mixers.s4d import S4D
from seqmix.optim import param_groups

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
out = {}
for cls in (S4, S4D):
    torch.manual_seed(rank)  # DDP gives all the weights of rank 0
    model = DistributedDataParallel(cls(4, 8))
    start = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    x = torch.randn(3, 11, 4, generator=torch.Generator().manual_seed(10 + rank))  # other data on each rank
    optimizer = torch.optim.AdamW(param_groups(model.module, 1e-2, 0.1))
    model(x).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for name, p in model.module.named_parameters():
        out[f"{cls.__name__}.{name}"] = hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()
        parts = p.detach()[..., 1:] != start[name][..., 1:]  # the imaginary halves, of pairs
        assert parts.all() or p.shape[-1] != 2, name
print(json.dumps(out), flush=True)
del model, optimizer
gc.collect()  # DDP's wrapper holds the group: gloo's threads, ended with the interpreter, abort one run in seven
dist.destroy_process_group()
