"""The public operator: its contract, the choice of an implementation, and what is handled for every backend."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import frame
from . import fa2, fa4, probe, reference, sdpa
from .reference import Windows, constant, known

# "auto" prefers the earlier of two that are equally fast
IMPLS = ("auto", "fa4", "fa2", "cudnn", "flash", "efficient", "math")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASKED = ("efficient", "math")  # these take any mask; the others support a causal mask, one window, and documents
SMALL_ORDER = ("flash", "fa2", "efficient", "cudnn")  # by the time of their launches on an H200; flash-attn-4's take longest
EARLIER = " (found in an earlier process)"
LARGE = 2**28  # scores, which take half a millisecond on an H200, forward and backward


class Case(NamedTuple):
    """Everything that decides which implementations can run; also the key under which the choice of "auto" is cached."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int  # as a backend sees it: after padding, and with the columns of ALiBi
    shared: int  # query heads per key head
    train: bool  # a gradient will be needed
    large: bool = True  # enough work that the GPU dominates, not the launch
    square: bool = True  # as many queries as keys
    windowed: bool = False
    packed: bool = False  # seq_idx is given
    cached: bool = False  # lengths are given
    dropout: bool = False


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | Sequence[int | None] | None = None,
    slopes: Sequence[float] | None = None,
    seq_idx: Tensor | None = None,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Causal softmax attention (Vaswani et al. 2017, §3.2.1); the last query is at the position of the last key.

        t_i = S - L + i                                                          the position of query i
        a_is = softmax_s(q_i · k_s / √P - slope (t_i - s))                        over s <= t_i, t_i - s < window
        y_i = Σ_s a_is v_s

    Args:
        q: (B, L, H, P), in float32, bfloat16, float16 or float64.
        k, v: (B, S, H_kv, P), S >= L; query head h reads their head h // (H // H_kv) (Ainslie et al. 2023, "GQA").
            All three may have any strides; a tensor whose last axis is not contiguous is copied.
        window: how many keys a query sees, the last of them its own (Beltagy et al. 2020, §3.1): one number for all heads or
            one per head; None is no limit.
        slopes: one per head (Press et al. 2022, "ALiBi", §3); constants, not differentiated.
        seq_idx: (B, L) integers, with S = L. Where it changes a new document starts, which sees nothing before it. Padding
            on either side is a document of its own.
        lengths: (B,) int32, the number of keys in each row. Its last query is at position lengths - 1 instead of S - 1;
            later keys and values do not affect the result, provided they are finite. A query before the first key
            gives 0.
        dropout: probability for the weights a. The caller passes 0 in evaluation.
        impl: one of IMPLS; README.md compares them. "auto" selects what `which_impl` returns.

    Returns:
        (B, L, H, P) in q's dtype, contiguous. Differentiable in q, k, v; twice only with "math". Gradients are bitwise
        reproducible under torch.use_deterministic_algorithms, but not by default: FlashAttention sums dq in no fixed order.

    Under autocast q, k, v are cast to the autocast dtype. Softmax weights are computed in float32 whatever the dtype.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = frame.autocast_dtype(q) or q.dtype
        with torch.autocast(device, enabled=False):
            return attention(q.to(dtype), k.to(dtype), v.to(dtype), window, slopes, seq_idx, lengths, dropout, impl)
    windows = _windows(window, q)
    slopes = None if slopes is None else tuple(float(m) for m in slopes)
    _check(q, k, v, windows, slopes, seq_idx, lengths, dropout)
    case = case_of(q, k, v, windows, slopes, seq_idx, lengths, dropout)
    name = _choose(case, impl)
    if q.numel() == 0:
        return q + 0 * (k.sum() + v.sum())  # k and v still get gradients, which are zero
    if k.shape[1] == 1:  # y is v: this needs no kernel, and cuDNN rejects it
        name = "math"
    scale, width = q.shape[-1] ** -0.5, q.shape[-1]
    if name == "math":
        return reference.attention(q, k, v, scale, windows, slopes, seq_idx, lengths, dropout)
    if slopes is not None:
        q, k = _with_alibi(q, k, slopes, scale)
    q, k, v = (_pad(t, _round_up(case.head_dim, fa4.WIDTH if name == "fa4" else 8)) for t in (q, k, v))
    if windows is None or name in MASKED or (name == "flash" and device == "cpu"):
        y = _run(name, q, k, v, scale, windows, seq_idx, lengths, dropout)
    else:
        y = _by_window(name, q, k, v, scale, windows, seq_idx, lengths, dropout)
    return y[..., :width] if y.shape[-1] > width else y


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n), ... 2^-8 for n heads if n is a power of 2; otherwise those of the next lower power, then every
    other slope of twice that power (Press et al. 2022, §3, and its footnote's code)."""
    n = 2 ** math.floor(math.log2(n_heads))
    first = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-8 * (i + 1) / (2 * n)) for i in range(0, 2 * n, 2)]
    return tuple((first + between)[:n_heads])


def case_of(q, k, v, windows=None, slopes=None, seq_idx=None, lengths=None, dropout=0.0) -> Case:
    """The case of one call of `attention`; of q, k, v it reads shapes, dtype, device and whether a gradient is needed."""
    columns = 0 if slopes is None else len(_alibi_pieces(slopes, q.shape[-1] ** -0.5, q.dtype)) * _digits(k.shape[1])
    return Case(
        q.device, q.dtype, _round_up(q.shape[-1] + columns, 8), q.shape[2] // k.shape[2],
        train=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        large=known(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] >= LARGE),
        square=known(q.shape[1] == k.shape[1]), windowed=windows is not None, packed=seq_idx is not None,
        cached=lengths is not None, dropout=dropout > 0,
    )  # fmt: skip


# ---- the choice ----------------------------------------------------------------------------------------------------


def why_not(impl: str, case: Case) -> str | None:
    """Why `impl` cannot run in this case, as far as that is known without running it; None if it can."""
    if impl == "math":
        return None
    if impl == "fa4":
        return fa4.why_not(case)
    if impl == "fa2":
        return fa2.why_not(case)
    return sdpa.why_not(impl, case)


def which_impl(case: Case) -> tuple[str, str]:
    """What "auto" selects, and why it rejects those before it in IMPLS: ("cudnn", "fastest of ...; fa4: ...").

    On a GPU every candidate is compared once with "math", forward and backward, and those that agree are timed over 2^30
    scores; one must be 5 % faster than those before it to be preferred. A small case is dominated by launches: a measurement
    would choose by chance, and differently on every rank, so the first of SMALL_ORDER that agrees is selected. The choice is
    cached for the life of the process; `tried_choices` passes it to another.
    """
    return _decide_as_constant(*case)


@frame.constant  # the fields are passed one by one, because a NamedTuple does not arrive as a NamedTuple
def _decide_as_constant(*fields) -> tuple[str, str]:
    return _decide_once(Case(*fields), torch.are_deterministic_algorithms_enabled())


Tried = tuple[str, str, str, Case]  # name of the GPU, torch's version, precision of float32 products, case

_tried: dict[Tried, tuple[str, str]] = {}  # measured in this process
_handed: dict[Tried, tuple[str, str]] = {}  # received from another process


def tried_choices() -> dict[Tried, tuple[str, str]]:
    """What "auto" selected on a GPU after running its candidates, and why: in this process, or in another whose choices were
    passed to `take_choices`."""
    return _handed | _tried


def take_choices(choices: Mapping[Tried, tuple[str, str]]) -> None:
    """Reuse choices that another process measured (`tried_choices`). A choice applies to the same GPU and torch version, if the
    implementation can run here; its reason then says that it was measured earlier. Cases already decided do not change."""
    _handed.update(choices)


@functools.cache
def _decide_once(case: Case, repeatable: bool) -> tuple[str, str]:
    """Cached per setting of torch.use_deterministic_algorithms (`repeatable`), because it decides which backends can run."""
    if case.device.type == "cuda" and not torch.cuda.is_available():
        return "math", "there is no GPU here, so such tensors are FakeTensorMode's: only shapes are computed"
    key = None
    if case.device.type == "cuda" and not case.cached and case.dtype != torch.float64:  # the cases in which candidates are run
        key = torch.cuda.get_device_name(case.device), torch.__version__, torch.get_float32_matmul_precision(), case
    name, reason = _handed.get(key, (None, ""))
    if name is None or why_not(name, case) is not None:
        name, reason = _decide(case)
        if key is not None:
            _tried[key] = name, reason
    elif not reason.endswith(EARLIER):
        reason += EARLIER
    slow = name == "math" and case.dtype != torch.float64
    frame.say(f"attention in {str(case.dtype)[6:]}", str(case.device), name, reason, slow)
    return name, reason


def _decide(case: Case) -> tuple[str, str]:
    if case.dtype == torch.float64:
        return "math", "float64 is for checking: the plain equation"
    reasons = {name: why_not(name, case) for name in IMPLS[1:]}
    if case.device.type == "cuda" and not case.large:
        reasons["fa4"] = reasons["fa4"] or "slow to launch, and compiles for seconds"
    able = [name for name, reason in reasons.items() if reason is None]
    told = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    if case.device.type == "cuda" and not case.cached:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("nothing can be measured while a CUDA graph is captured: call attention once before the capture")
        right, times = [], {}
        # math is the reference of the comparison
        for name in able[:-1] if case.large else sorted(able[:-1], key=SMALL_ORDER.index):
            run = functools.partial(_attention, name)
            try:
                probe.check(run, case)
                if case.large:
                    times[name] = probe.milliseconds(run, case)
                right.append(name)
            except Exception as error:  # of any kind: it is reported, and the next candidate is tried
                line = (str(error).splitlines() or [""])[0]
                told.append(f"{name}: failed its probe ({type(error).__name__}: {line[:200]})")
            if right and not case.large:
                break
        if not right:
            return "math", "; ".join(["nothing else can run here", *told])
        if not case.large:
            return right[0], "; ".join(["launches dominate in so small a case: the cheapest to launch", *told])
        best = next(n for n in right if all(times[n] < 1.05 * times[m] for m in right))
        return best, "; ".join([f"fastest of {', '.join(f'{n} {times[n]:.3f}' for n in right)} ms", *told])
    return able[0], "; ".join(told) or "the first choice"


def _attention(impl, q, k, v, *options):
    return attention(q, k, v, *options, impl=impl)


def _choose(case: Case, impl: str) -> str:
    if impl == "auto":
        return which_impl(case)[0]
    frame.require(impl, IMPLS, why_not, case)
    return impl


# ---- handled for every backend: windows per head, ALiBi, head sizes --------------------------------------------------


def _run(name, q, k, v, scale, windows, seq_idx, lengths, dropout):
    if name in ("fa4", "fa2") or (name == "flash" and q.is_cuda):
        window = None if windows is None else windows[0]
        backend = {"fa4": fa4, "fa2": fa2, "flash": sdpa}[name]
        if seq_idx is None:
            return backend.flash(q, k, v, scale, window, None, lengths, dropout)
        offsets = torch.ops.seqmix.document_offsets(seq_idx)
        flat = (t.flatten(0, 1) for t in (q, k, v))  # (B L, H, P)
        return backend.flash(*flat, scale, window, offsets, None, dropout, longest=q.shape[1]).view(q.shape)
    return sdpa.masked(name, q, k, v, scale, windows, seq_idx, lengths, dropout)


def _by_window(name, q, k, v, scale, windows, seq_idx, lengths, dropout):
    """One call for the heads of each window."""
    groups = {w: [h for h, own in enumerate(windows) if own == w] for w in windows}
    if len(groups) == 1:
        return _run(name, q, k, v, scale, windows, seq_idx, lengths, dropout)
    shared, ys = q.shape[2] // k.shape[2], []
    for w, heads in groups.items():
        part = _heads(q, heads), *(_heads(t, [h // shared for h in heads]) for t in (k, v))
        ys.append(_run(name, *part, scale, None if w is None else (w,) * len(heads), seq_idx, lengths, dropout))
    y, order = torch.cat(ys, dim=2), [h for heads in groups.values() for h in heads]
    return y if order == sorted(order) else _heads(y, [order.index(h) for h in range(len(order))])


def _heads(t: Tensor, heads: list[int]) -> Tensor:
    first, last = heads[0], heads[-1]
    if heads == list(range(first, last + 1)):
        return t[:, :, first : last + 1]
    return t.index_select(2, constant(tuple(heads), torch.int32, t.device))


def _with_alibi(q: Tensor, k: Tensor, slopes: tuple[float, ...], scale: float) -> tuple[Tensor, Tensor]:
    """q and k with extra columns whose product is slope · s: every backend then adds the bias by itself, in float32.

    Within one row of scores t is constant and does not change the softmax, so -slope (t - s) may be replaced by
    slope · (s - S + 1). In base 256 the digits of S - 1 - s are exact in 16 bits, and slope / scale is the sum of up to three
    16-bit numbers.
    """
    B, S = k.shape[:2]
    back = torch.arange(S - 1, -1, -1, device=k.device)  # (S,)
    pieces, digits = _alibi_pieces(slopes, scale, q.dtype), _digits(S)
    q_columns, k_columns = [], []
    for i in range(digits):
        beyond = 256 ** max(i - 1, 0)  # the largest float16 is 65504
        digit = (back // 256**i % 256 * 256 ** min(i, 1)).to(k.dtype)
        q_columns += [[-m * beyond for m in piece] for piece in pieces]
        k_columns += [digit] * len(pieces)
    right = constant(tuple(zip(*q_columns, strict=True)), q.dtype, q.device)  # (H, C)
    q = torch.cat((q, right.expand(*q.shape[:2], -1, -1)), dim=-1)
    return q, torch.cat((k, torch.stack(k_columns, -1)[:, None].expand(B, S, k.shape[2], -1)), dim=-1)


def _alibi_pieces(slopes: tuple[float, ...], scale: float, dtype: torch.dtype) -> list[list[float]]:
    """Lists (H,) of numbers of `dtype` whose sum is slope / scale, to 24 bits or better."""
    return (_find_pieces if torch.compiler.is_compiling() else _keep_pieces)(slopes, scale, dtype)


def _find_pieces(slopes, scale, dtype):
    rest, pieces = [m / scale for m in slopes], []
    while len(pieces) < 3 and any(abs(r) > 1e-9 * m / scale for r, m in zip(rest, slopes, strict=True)):
        pieces.append([_rounded(r, dtype) for r in rest])
        rest = [r - p for r, p in zip(rest, pieces[-1], strict=True)]
    return pieces


_keep_pieces = functools.cache(_find_pieces)


def _rounded(x: float, dtype: torch.dtype) -> float:
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}[dtype]
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def _digits(S: int) -> int:
    return 1 + known(S > 256) + known(S > 256**2)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad(t: Tensor, width: int) -> Tensor:
    if t.shape[-1] < width:
        return F.pad(t, (0, width - t.shape[-1]))
    return t if t.stride(-1) == 1 else t.contiguous()


def _document_offsets(seq_idx):
    """(B, L) -> where each document starts in the rows laid end to end, then the total length: int32. Synchronizes with the
    device."""
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return F.pad(new.flatten().nonzero()[:, 0], (0, 1), value=seq_idx.numel()).to(torch.int32)


def _fake_document_offsets(seq_idx):
    return seq_idx.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)


frame.register("document_offsets", "(Tensor seq_idx) -> Tensor", _document_offsets, _fake_document_offsets)


# ---- contract ------------------------------------------------------------------------------------------------------


def _windows(window, q: Tensor) -> Windows | None:
    if window is None:
        return None
    H = q.shape[2] if q.dim() == 4 else 0
    windows = tuple(window) if isinstance(window, Sequence) else (window,) * H
    if len(windows) != H or any(w is not None and (not isinstance(w, int) or w < 1) for w in windows):
        raise ValueError(f"window must be a positive integer, or one (or None) for each of {H} heads; got {window!r}")
    return None if all(w is None for w in windows) else windows


def _check(q, k, v, windows, slopes, seq_idx, lengths, dropout) -> None:
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q must be (B, L, H, P) and k (B, S, H_kv, P); got {tuple(q.shape)} and {tuple(k.shape)}")
    B, L, H, P = q.shape
    S, H_kv = k.shape[1:3]
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float32, bfloat16, float16 or float64; got {q.dtype}")
    if P < 1 or k.shape != (B, S, H_kv, P) or v.shape != k.shape:
        raise ValueError(f"k and v must be (B, S, H_kv, P) with B = {B} and P = {P}; got {tuple(k.shape)} and {tuple(v.shape)}")
    if H_kv < 1 or H % H_kv:
        raise ValueError(f"the heads of k must divide those of q; got {H_kv} and {H}")
    if S < L:
        raise ValueError(f"there must be at least as many keys as queries; got L = {L} and S = {S}")
    for name, t in (("k", k), ("v", v), ("seq_idx", seq_idx), ("lengths", lengths)):
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q; got {t.device}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} like q; got {t.dtype}")
    if slopes is not None and (len(slopes) != H or not all(0 <= m < math.inf for m in slopes)):
        raise ValueError(f"slopes must be {H} finite numbers of at least 0, one per head; got {slopes}")
    if seq_idx is not None:
        if lengths is not None or S != L:
            raise ValueError(f"seq_idx is for whole sequences, without lengths and with S = L; got L = {L} and S = {S}")
        if seq_idx.shape != (B, L):
            raise ValueError(f"seq_idx must be (B, L) = {(B, L)}; got {tuple(seq_idx.shape)}")
        if seq_idx.is_floating_point() or seq_idx.is_complex() or seq_idx.dtype == torch.bool:
            raise ValueError(f"seq_idx must hold integers; got {seq_idx.dtype}")
    if lengths is not None and (lengths.shape != (B,) or lengths.dtype != torch.int32):
        raise ValueError(f"lengths must be ({B},) of int32; got {tuple(lengths.shape)} of {lengths.dtype}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1); got {dropout!r}")
