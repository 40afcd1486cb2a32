"""Measures Mamba at the 130M size (24 layers of 768, 50277 tokens) on a GPU: a training step, or decoding.

    python tests/measure_mamba_130m.py train  [--batch 8] [--length 2048] [--levels 0,1,2] [--ways eager,graph]
    python tests/measure_mamba_130m.py decode [--batches 1,64] [--prompt 2048] [--tokens 128]

Training: float32 parameters, bfloat16 autocast, fused AdamW, cross-entropy over all positions; peak is what torch's
allocator held at most in a step after the first. Decoding: bfloat16 weights, float32 states, the whole model and the choice
of the next token in one CUDA graph, one replay a token. Times are medians of CUDA-event timings. One JSON line a point.
"""

import argparse
import itertools
import json
import statistics
import time
from functools import partial

import torch

from seqmix.decode import Decoder
from seqmix.measure import environment
from seqmix.mixers.mamba import Mamba
from seqmix.model import SequenceModel
from seqmix.state import state_bytes
from seqmix_kernels.ops.cross_entropy import cross_entropy

SIZES = dict(vocab_size=50277, d_model=768, n_layer=24)


def median_ms(call, count):
    """Median over `count` calls after two, and the interquartile range."""
    times = []
    for i in range(count + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if i > 1:
            times.append(start.elapsed_time(stop))
    q1, q2, q3 = statistics.quantiles(times, n=4)
    return q2, q3 - q1


def train(args):
    for level, way in itertools.product(map(int, args.levels.split(",")), args.ways.split(",")):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = SequenceModel(**SIZES | {"vocab_size": args.vocab}, mixer=partial(Mamba, checkpoint_level=level))
        run = torch.compile(model) if way == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=way == "graph")
        tokens = torch.randint(args.vocab, (args.batch, args.length + 1), device="cuda")

        def step(run=run, optimizer=optimizer, tokens=tokens):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                logits = run(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), impl=args.loss).mean()
            del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        begin = time.perf_counter()
        first = step().item()
        first_s = time.perf_counter() - begin
        step()
        torch.cuda.synchronize()
        call = step
        if way == "graph":
            with torch.cuda.stream(torch.cuda.Stream()):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.reset_peak_memory_stats()
            with torch.cuda.graph(graph):
                step()
            call = graph.replay
        else:
            torch.cuda.reset_peak_memory_stats()
        ms, iqr = median_ms(call, args.count)
        if args.profile and way == "eager":
            profile(call, args.profile)
        row = {"level": level, "way": way, "batch": args.batch, "length": args.length, "vocab": args.vocab, "loss": args.loss,
               "ms": round(ms, 2), "iqr_ms": round(iqr, 2), "tokens_per_second": round(args.batch * args.length / ms * 1e3),
               "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20), "first_loss": first,
               "first_step_s": round(first_s, 1)}  # fmt: skip
        print(json.dumps(row), flush=True)
        graph = None
        del model, run, optimizer, step, call
        torch.compiler.reset()
        torch.cuda.empty_cache()


def profile(call, rows):
    """Time on the GPU by kernel, and its sum."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    found = [e for e in prof.key_averages() if e.self_device_time_total > 0]
    found.sort(key=lambda e: -e.self_device_time_total)
    print(f"on the GPU {sum(e.self_device_time_total for e in found):.0f} us, {sum(e.count for e in found)} kernels")
    for e in found[:rows]:
        us = e.self_device_time_total
        print(f"{us:10.0f} us {e.count:5} x {us / e.count:8.1f}  {e.key[:110]}", flush=True)


@torch.no_grad()
def decode(args):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = SequenceModel(**SIZES, mixer=Mamba).eval()
    for module in model.modules():  # what autocast would cast at every call
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.to(torch.bfloat16)
    for batch, decode in itertools.product(map(int, args.batches.split(",")), args.decode.split(",")):
        for block in model.blocks:
            block.mixer.decode = decode
        prompt = torch.randint(SIZES["vocab_size"], (batch, args.prompt), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits, state = model.prefill(prompt, model.init_state(batch))
        decoder = Decoder(model, state, logits[:, -1].argmax(-1), autocast=torch.bfloat16)
        size = state_bytes(state) // batch
        del logits, state
        decoder.advance()
        if args.profile:
            profile(decoder.advance, args.profile)
        eager, _ = median_ms(decoder.advance, 5)
        decoder.capture(8 * args.tokens)
        ms, iqr = median_ms(lambda decoder=decoder: [decoder.advance() for _ in range(args.tokens)], 5)
        ms, iqr = ms / args.tokens, iqr / args.tokens
        row = {"batch": batch, "prompt": args.prompt, "ms_a_token": round(ms, 4), "iqr_ms": round(iqr, 5),
               "tokens_per_second": round(batch / ms * 1e3), "eager_ms_a_token": round(eager, 3),
               "state_bytes_a_row": size, "decode": decode}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "decode"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--levels", default="0,1,2")
    parser.add_argument("--count", type=int, default=10, help="steps timed")
    parser.add_argument("--ways", default="eager,graph", help="eager, compiled, graph: the whole step as one CUDA graph")
    parser.add_argument("--loss", default="reference", help="reference: torch's; fused: seqmix_kernels.ops.cross_entropy")
    parser.add_argument("--vocab", type=int, default=SIZES["vocab_size"])
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--decode", default="fused", help="implementations of the step, separated by commas")
    parser.add_argument("--profile", type=int, default=0, help="print so many rows of a profile of an eager step")
    args = parser.parse_args()
    print(json.dumps(environment(torch.device("cuda"))), flush=True)
    {"train": train, "decode": decode}[args.what](args)
