"""Times a training step of a Transformer of 125M parameters on the GPU at hand, beside Hugging Face's Llama of the same sizes.

    python tests/bench_transformer.py [ours] [hf] [--batch 8] [--length 2048] [--no-compile]

12 blocks of 768, 12 heads, SwiGLU of 2048, vocabulary of 50277, tied head; float32 parameters, bfloat16 autocast, fused AdamW,
torch.compile over model and loss. One step is forward, loss, backward, optimizer; the median of 20 after 5.
"""

import argparse
import time
from importlib import metadata

import torch
import torch.nn.functional as F

VOCAB, D, LAYERS, HEADS, HIDDEN = 50277, 768, 12, 12, 2048


def ours():
    from functools import partial

    from seqmix.channel_mixers import SwiGLU
    from seqmix.mixers.attention import Attention
    from seqmix.model import SequenceModel

    model = SequenceModel(VOCAB, D, LAYERS, partial(Attention, n_heads=HEADS), partial(SwiGLU, expand=HIDDEN / D)).cuda()

    def loss(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), ignore_index=-100)

    return model, loss


def hf():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda()

    def loss(tokens, targets):
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss


def measure(name, make, args):
    torch.manual_seed(0)
    start = time.perf_counter()
    model, loss = make()
    run = torch.compile(loss) if args.compile else loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCAB, (args.batch, args.length), device="cuda")
    targets = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), 1)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            value = run(tokens, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    first_loss = step().item()
    first = time.perf_counter() - start
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        last = step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    ms = sorted(times)[10]
    peak = torch.cuda.max_memory_allocated() / 2**20
    fresh = torch.randint(VOCAB, tokens.shape, device="cuda")  # of tokens that follow from nothing no model knows the next
    with torch.autocast("cuda", torch.bfloat16):
        unseen = run(fresh, torch.cat((fresh[:, 1:], torch.full_like(fresh[:, :1], -100)), 1)).item()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"| {name} | {parameters / 1e6:.1f} M | B{args.batch} L{args.length} | {'compiled' if args.compile else 'eager'} | "
        f"{ms:.2f} ms ({min(times):.2f} to {max(times):.2f}) | {args.batch * args.length / ms:.1f} k tokens/s | "
        f"{peak:,.0f} MiB | first step {first:.1f} s | "
        f"loss {first_loss:.3f} to {last:.3f}, of tokens never seen {unseen:.2f} |",
        flush=True,
    )
    if name == "ours":
        with torch.autocast("cuda", torch.bfloat16):
            print(model.kernels_used(args.batch, args.length), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("which", nargs="*", default=["ours", "hf"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for name in args.which:
        if name == "hf":
            print("transformers", metadata.version("transformers"), flush=True)
        measure(name, {"ours": ours, "hf": hf}[name], args)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
