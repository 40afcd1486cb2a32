"""What a model costs: a training step, a prompt, a token, a row of state. For any SequenceModel; names no architecture.

    training_cost     forward, backward, optimizer: milliseconds, tokens a second, peak memory, share of the card's FLOPs
    prompt_cost       a prompt of L tokens into the state, and what that state weighs
    decoding_cost     a token after that: eagerly, and under a CUDA graph
    context_cost      both, over one prompt
    largest_batch     rows that decode at once in so much memory

Each compares what it runs with the same model in float64, on a piece short enough for that: `check_error` is the relative
error of the logits (Frobenius), and WrongError, in place of any number, where it is above TOLERANCE of the dtype;
`check_seconds` is what that took. Times are medians in milliseconds with their interquartile range (`*_iqr`) and number of
calls; warm-up is not among them, the first call is apart.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from seqmix.decode import WARMUP, Decoder, greedy
from seqmix.measure import Sensors, Spread, parameter_count, time_calls
from seqmix.memory import PeakMemory
from seqmix.mixers.base import PRODUCTS
from seqmix.state import held_bytes, repeated, reserved, state_bytes, tensors

CHECKED = 64  # tokens compared with float64
COUNTED = 4  # tokens whose FLOPs are counted, and twice as many
# relative error of logits after a whole model; a kernel that is wrong is off by its own size, or leaks the future
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# dense matrix FLOP/s of data sheets, by a word of the card's name and the dtype
PEAK_FLOPS = {
    ("H200", torch.bfloat16): 989e12, ("H200", torch.float32): 67e12,
    ("H100", torch.bfloat16): 989e12, ("H100", torch.float32): 67e12,
    ("A100", torch.bfloat16): 312e12, ("A100", torch.float32): 19.5e12,
}  # fmt: skip
BURST = 16  # tokens of one timed call of a graph: a replay at a time would time the events, too
MOST_BURSTS = 20
ROOM = 384  # for the tokens timed, warm-up included; a multiple of what a cache is read by
Numbers = dict[str, float | int | None]


class WrongError(RuntimeError):
    """What was to be timed does not compute what it should."""


def random_tokens(vocab_size: int, batch: int, length: int, device: torch.device, seed: int = 0) -> Tensor:
    """(batch, length) int64, drawn on the host, so that every device gets the same."""
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def training_cost(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    *,
    autocast: torch.dtype | None = None,
    seconds: float = 1.0,
) -> Numbers:
    """A step on tokens (B, L + 1): forward with the loss of all B · L next tokens, backward, optimizer.

    autocast: dtype of the products; None: that of the parameters. flops_per_token: three times `forward_flops`; mfu: over the
    data sheet's dense peak, None for a card not in PEAK_FLOPS.
    """
    device, dtype = tokens.device, autocast or next(model.parameters()).dtype
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model.train()
    started = time.perf_counter()
    want = _exact_logits(model, inputs[:1, :CHECKED])  # of the weights as they are before the first step
    flops = 3 * forward_flops(model, inputs.shape[1])  # a token
    check_seconds = time.perf_counter() - started
    with torch.no_grad(), _precision(device, autocast):
        got = model.head(model.hidden(inputs)[:1, :CHECKED])
    loss: list[Tensor] = []

    def forward() -> None:
        with _precision(device, autocast):
            losses, _ = model.score(inputs, targets)
        loss[:] = [losses.mean()]

    def backward() -> None:
        optimizer.zero_grad()
        loss[0].backward()

    peak, sensors = PeakMemory(device), Sensors(device)
    _free(device)
    phases = {"forward": forward, "backward": backward, "optimizer": optimizer.step}
    timing = time_calls(phases, device, seconds=seconds, after_warmup=peak.reset, between=sensors)
    error = _relative_error(got, want, dtype)
    if not bool(torch.isfinite(loss[0])):
        raise WrongError(f"the loss of a training step is {float(loss[0])}")
    step_seconds = timing.whole.median / 1e3
    bound = _peak_flops(device, dtype)
    return {
        "params": parameter_count(model).total,
        "params_non_embedding": parameter_count(model).non_embedding,
        "tokens": inputs.numel(),
        "first_call_ms": timing.first_ms,
        **_named("step_ms", timing.whole),
        "calls": timing.whole.count,
        **{f"{name}_ms": part.median for name, part in timing.phases.items()},
        "tokens_per_second": inputs.numel() / step_seconds,
        "flops_per_token": flops,
        "mfu": flops * inputs.numel() / step_seconds / bound if bound else None,
        **_peaks(peak),
        "check_error": error,
        "check_seconds": check_seconds,
        **sensors.summary(),
    }


@torch.no_grad()
def forward_flops(model: nn.Module, length: int) -> float:
    """FLOPs a token of a forward over `length` tokens: the products with weights, and what grows with the length, as
    attention's scores do (all of them counted, also those that a causal kernel skips). Scans, FFTs and what is done element
    by element are left out.

    Products with weights are two FLOPs a number in them. What grows is counted on the model in float64, where no fused kernel
    hides it: what goes with the square of the length of a short sequence, counted once where all blocks are alike.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, where it is installed

    parts = [m for m in model.modules() if isinstance(m, PRODUCTS)]  # the embedding is the head
    weights = {p for part in parts for p in part.parameters(recurse=False) if p.ndim == 2}
    exact, alike = copy.deepcopy(model).double().eval(), 1
    if len({str(block) for block in getattr(exact, "blocks", ())}) == 1:
        exact.blocks, alike = exact.blocks[:1], len(exact.blocks)

    def counted(batch: int, n: int) -> int:
        tokens = torch.zeros(batch, n, dtype=torch.long, device=next(model.parameters()).device)
        with FlopCounterMode(display=False) as counter, torch.autocast(tokens.device.type, enabled=False):
            exact(tokens)
        return counter.get_total_flops()

    # of one row more: what is made once for all rows, as a convolution's kernel, is not of the tokens
    once, twice = (counted(2, n) - counted(1, n) for n in (COUNTED, 2 * COUNTED))
    square = alike * (twice - 2 * once) / (2 * COUNTED**2)
    return 2 * sum(p.numel() for p in weights) + square * length


@torch.no_grad()
def prompt_cost(model: nn.Module, tokens: Tensor, *, autocast: torch.dtype | None = None, seconds: float = 1.0) -> Numbers:
    """A prompt: tokens (B, L) into the state, with the logits of the last. And that state: `state_bytes` summed over its
    tensors, `state_bytes_measured` what the allocator (on a CPU: the storages) has been asked for once it is there."""
    model.eval()
    started = time.perf_counter()
    error = _prompt_error(model, tokens[:1, :CHECKED], autocast)
    check_seconds = time.perf_counter() - started
    numbers, _, _ = _prompt(model, tokens, autocast, seconds)
    return numbers | {"check_error": error, "check_seconds": check_seconds}


@torch.no_grad()
def decoding_cost(
    model: nn.Module, prompt: Tensor, batch: int, *, autocast: torch.dtype | None = None, seconds: float = 1.0
) -> Numbers:
    """A token after the prompt (b, L), for `batch` rows that carry its state, row by row in turn: `eager_ms` as the host
    launches it, `graph_ms` as one replay of a CUDA graph (None, and `no_graph` says why, where there is none).

    Both take a token in and draw the likeliest next one. The context grows by the tokens timed, BURST a call."""
    model.eval()
    started = time.perf_counter()
    error = _decoding_error(model, prompt, autocast)
    check_seconds = time.perf_counter() - started
    with _precision(prompt.device, autocast):
        after = [*model.prefill_last(prompt, model.init_state(len(prompt)))]
    return _decoding(model, after, batch, autocast, seconds) | {"check_error": error, "check_seconds": check_seconds}


@torch.no_grad()
def context_cost(model: nn.Module, prompt: Tensor, *, autocast: torch.dtype | None = None, seconds: float = 1.0) -> Numbers:
    """`prompt_cost`, and `decoding_cost` of the state that it leaves; the check is that of decoding, which begins with a
    prompt."""
    model.eval()
    started = time.perf_counter()
    error = _decoding_error(model, prompt, autocast)
    check_seconds = time.perf_counter() - started
    numbers, *after = _prompt(model, prompt, autocast, seconds)
    numbers |= _decoding(model, after, len(prompt), autocast, seconds)
    return numbers | {"check_error": error, "check_seconds": check_seconds}


def _prompt(model: nn.Module, tokens: Tensor, autocast: torch.dtype | None, seconds: float) -> tuple[Numbers, Tensor, object]:
    """Its numbers; the logits (B, V) and the state that the last timed call left."""
    device, on_gpu = tokens.device, tokens.device.type == "cuda"
    kept: list = []
    before = 0

    def prefill() -> None:
        kept.clear()
        kept.extend(model.prefill_last(tokens, model.init_state(len(tokens))))

    def settle() -> None:
        nonlocal before
        kept.clear()
        _free(device)
        before = _requested(device) if on_gpu else 0
        peak.reset()

    peak, sensors = PeakMemory(device), Sensors(device)
    with _precision(device, autocast):
        timing = time_calls({"prefill": prefill}, device, seconds=seconds, after_warmup=settle, between=sensors)
        held = _requested(device) - before if on_gpu else 0  # in here: autocast drops its copies of the weights when it ends
    peaks = _peaks(peak)
    logits, state = kept
    if not bool(torch.isfinite(logits).all()):
        raise WrongError("the logits after the prompt are not finite")
    if on_gpu:  # the logits are there, too, in whatever storage they are a view of
        held -= held_bytes(logits)
    else:
        held = held_bytes(state)
    numbers = {
        "tokens": tokens.numel(),
        "prefill_first_ms": timing.first_ms,
        **_named("prefill_ms", timing.whole),
        "prefill_calls": timing.whole.count,
        "prefill_tokens_per_second": 1e3 * tokens.numel() / timing.whole.median,
        **{f"prefill_{name}": value for name, value in peaks.items()},
        "state_bytes": state_bytes(state),
        "state_bytes_measured": held,
        "state_tensors": sum(1 for _ in tensors(state)),
        **sensors.summary(),
    }
    return numbers, logits, state


def _decoding(model: nn.Module, after: list, batch: int, autocast: torch.dtype | None, seconds: float) -> Numbers:
    """after: logits (b, V) and state of a prompt. It is emptied: a state is not to stand beside the one that is timed."""
    logits, state = after
    after.clear()
    device, b = logits.device, len(logits)
    first = greedy(logits)[torch.arange(batch, device=device) % b]  # (B,)
    # room for what is timed: a cache that grows on the way would be copied, which is not a token's cost
    state = reserved(state, ROOM)
    if batch != b:
        state = repeated(state, batch)
    del logits
    eager = Decoder(model, state, first, autocast=autocast)
    _free(device)
    peak, sensors = PeakMemory(device), Sensors(device)
    settings = {"seconds": seconds / 2, "least": 5, "between": sensors}
    timing = time_calls({"step": eager.advance}, device, most=BURST * MOST_BURSTS, after_warmup=peak.reset, **settings)
    numbers = {
        "batch": batch,
        "eager_first_ms": timing.first_ms,
        **_named("eager_ms", timing.whole),
        "eager_calls": timing.whole.count,
        "eager_tokens_per_second": 1e3 * batch / timing.whole.median,
        **{f"decode_{name}": value for name, value in _peaks(peak).items()},
        **_named("graph_ms", Spread(None, None, 0)),
        "graph_calls": 0,
        "graph_tokens_per_second": None,
    }
    try:
        graphed = Decoder(model, state, first, autocast=autocast)
        del eager, state
        graphed.capture(room=ROOM - WARMUP)

        def burst() -> None:
            for _ in range(BURST):
                graphed.advance()

        timing = time_calls({"burst": burst}, device, most=MOST_BURSTS, **settings)
        numbers |= {
            "capture_ms": timing.first_ms,
            **_named("graph_ms", timing.whole, 1 / BURST),
            "graph_calls": timing.whole.count,
            "graph_tokens_per_second": 1e3 * batch * BURST / timing.whole.median,
        }
    except ValueError as reason:
        numbers["no_graph"] = str(reason)
    return numbers | sensors.summary()


@torch.no_grad()
def largest_batch(
    model: nn.Module, prompt: Tensor, limit_bytes: int, *, autocast: torch.dtype | None = None, most: int = 1 << 15
) -> Numbers:
    """Rows that can decode at once after a prompt (1, L) where this process may take `limit_bytes`, weights included.

    `rows_counted`: by arithmetic, the limit less the weights over the bytes of a row's state. On a GPU also `rows_tried`:
    doubled until a step runs out of memory, then halved in until 5 % are between one that fits and one that does not; no more
    than `most` are tried."""
    device = prompt.device
    model.eval()
    with _precision(device, autocast):
        _, state = model.prefill_last(prompt, model.init_state(1))
    state = reserved(state, 16)
    row, weights = state_bytes(state), sum(p.numel() * p.element_size() for p in model.parameters())
    numbers: Numbers = {
        "limit_bytes": limit_bytes,
        "weight_bytes": weights,
        "state_bytes": row,
        "rows_counted": max(0, (limit_bytes - weights) // row),
        "rows_tried": None,
        "rows_most": most,
    }
    if device.type != "cuda":
        return numbers

    def fits(batch: int) -> bool:
        _free(device)
        try:
            with _precision(device, autocast):
                many = repeated(state, batch)
                for _ in range(2):
                    _, many = model.step(prompt[0, :1].expand(batch), many)
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return False
        return True

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        numbers["rows_tried"] = boundary(fits, most)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return numbers


def boundary(fits: Callable[[int], bool], most: int, slack: float = 0.05) -> int:
    """The largest n that fits, to `slack` of itself; 0 where 1 does not, `most` where that does."""
    if not fits(1):
        return 0
    good, bad = 1, None
    while bad is None and good < most:
        n = min(2 * good, most)
        if fits(n):
            good = n
        else:
            bad = n
    while bad is not None and bad - good > max(1, slack * good):
        n = (good + bad) // 2
        if fits(n):
            good = n
        else:
            bad = n
    return good


# Right or wrong


def _exact_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (1, n, V) of tokens (1, n) by the model in float64."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        return exact(tokens)


def _relative_error(logits: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    error = float((logits.double() - want).norm() / want.norm())
    if not error <= TOLERANCE[dtype]:  # NaN is not
        raise WrongError(f"logits are {error:.2e} from those in float64, relatively; {dtype} may be {TOLERANCE[dtype]:.0e}")
    return error


def _prompt_error(model: nn.Module, tokens: Tensor, autocast: torch.dtype | None) -> float:
    with _precision(tokens.device, autocast):
        logits, _ = model.prefill(tokens, model.init_state(1))
    return _relative_error(logits, _exact_logits(model, tokens), autocast or next(model.parameters()).dtype)


def _decoding_error(model: nn.Module, prompt: Tensor, autocast: torch.dtype | None) -> float:
    """Relative error of decoding a piece of the prompt's first row, under a graph where that can be."""
    tokens = prompt[:1, :CHECKED]
    start = max(1, tokens.shape[1] - 4)
    with _precision(prompt.device, autocast):
        logits, state = model.prefill(tokens[:, :start], model.init_state(1))
    logits = [logits]
    # the token to take in next is that of the text, whatever the logits say
    decoder = Decoder(model, state, tokens[:, start - 1], autocast=autocast)
    with contextlib.suppress(ValueError):
        decoder.capture(room=CHECKED)
    for t in range(start, tokens.shape[1]):
        decoder.tokens.copy_(tokens[:, t])
        decoder.advance()
        logits.append(decoder.logits[:, None].clone())  # a replay writes over them
    return _relative_error(torch.cat(logits, dim=1), _exact_logits(model, tokens), autocast or next(model.parameters()).dtype)


# Small parts


@contextlib.contextmanager
def _precision(device: torch.device, autocast: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        yield


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(device)
    return next((flops for (name, of), flops in PEAK_FLOPS.items() if name in card and of == dtype), None)


def _named(name: str, times: Spread, factor: float = 1.0) -> Numbers:
    if times.median is None:
        return {name: None, f"{name}_iqr": None}
    return {name: times.median * factor, f"{name}_iqr": times.iqr * factor}


def _peaks(peak: PeakMemory) -> Numbers:
    return {"peak_allocated_mib": peak.allocated(), "peak_reserved_mib": peak.reserved(), "peak_host_mib": peak.host()}


def _requested(device: torch.device) -> int:
    """Bytes that the tensors on a GPU were asked for: without what the allocator rounds up to."""
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
