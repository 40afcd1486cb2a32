"""The attention mixer: its equation with every option, its cache, and cases B, D of a Transformer under the harness.

tests/test_mixers.py holds the laws of every mixer for conf/model/transformer.yaml; here they are held for its options."""

import copy
import json
import math
import subprocess
import sys
from functools import partial

import pytest
import runs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqmix.channel_mixers import SwiGLU
from seqmix.mixers.attention import Attention, AttentionState
from seqmix.model import SequenceModel
from seqmix.state import state_bytes, tensors
from seqmix_kernels.ops.attention import alibi_slopes, rotary_phases, rotate

D, V = 24, 11
EXACT = dict(rtol=0, atol=1e-12)
OPTIONS = {
    "rope": {},
    "shared heads": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1},
    "qk_norm": {"qk_norm": True},
    "half of a head": {"rotary_fraction": 0.667},
    "linear": {"rope_factor": 4.0},
    "ntk": {"rope_factor": 4.0, "rope_scaling": "ntk"},
    "none": {"positions": "none"},
    "alibi": {"positions": "alibi", "n_kv_heads": 2},
    "hard_alibi": {"positions": "hard_alibi"},
    "window": {"window": 5},
    "bias": {"bias": True},
    "small pages": {"cache_page": 3},
}
over_options = pytest.mark.parametrize("option", OPTIONS)


def normal(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def make(option="rope", dtype=torch.float64, **keys):
    torch.manual_seed(0)
    mixer = Attention(D, **OPTIONS[option], **keys)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.02 * torch.randn_like(p)
    return mixer.to(dtype).eval()


def pieces(mixer, x, sizes, state=None):
    state, ys = mixer.init_state(len(x)) if state is None else state, []
    for piece in x.split(sizes, dim=1):
        y, state = mixer.prefill(piece, state)
        ys.append(y)
    return torch.cat(ys, dim=1), state


def steps(mixer, x, state):
    ys = []
    for x_t in x.unbind(1):
        y, state = mixer.step(x_t, state)
        ys.append(y)
    return torch.stack(ys, dim=1), state


# -- the equation -----------------------------------------------------------------------------------------------------


def test_attention_is_its_equation():
    mixer, x = make(), normal(2, 13, D)
    B, L, H, P = 2, 13, 4, D // 4
    q, k, v = (part.view(B, L, H, P) for part in (x @ mixer.qkv_proj.weight.T).chunk(3, dim=-1))
    turn = torch.polar(  # pair (i, i + P/2) as one complex number, turned by t · 10000^(-2i/P)
        torch.ones(L, P // 2, dtype=torch.float64),
        torch.arange(L)[:, None] * 10_000.0 ** (-2 * torch.arange(P // 2, dtype=torch.float64) / P),
    )
    q, k = (torch.complex(z[..., : P // 2], z[..., P // 2 :]) * turn[:, None] for z in (q, k))
    scores = torch.einsum("blhp,bshp->bhls", q, k.conj()).real / math.sqrt(P)
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf)
    y = torch.einsum("bhls,bshp->blhp", scores.softmax(-1), v).reshape(B, L, D)
    torch.testing.assert_close(mixer(x), mixer.out_proj(y), **EXACT)


@pytest.mark.parametrize("option", ["alibi", "hard_alibi", "window", "none"])
def test_biases_and_windows_by_their_matrices(option):
    """softmax(q·k/√P + bias) with the (H, L, L) matrix of the paper written out."""
    mixer, x, L, H, P = make(option), normal(2, 13, D), 13, 4, 6
    back = torch.arange(L)[:, None] - torch.arange(L)  # t - s
    bias = torch.zeros(H, L, L, dtype=torch.float64)
    if option == "alibi":
        bias -= torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).double()[:, None, None] * back
    if option == "hard_alibi":  # head 0 sees itself, head 1 one token more, heads 2 and 3 all
        bias[0][back > 0], bias[1][back > 1] = -math.inf, -math.inf
    if option == "window":
        bias[:, back > 4] = -math.inf
    bias[:, back < 0] = -math.inf
    heads = (x @ mixer.qkv_proj.weight.T).view(2, L, -1, P)
    q, (k, v) = heads[:, :, :H], (t.repeat_interleave(H // mixer.n_kv_heads, 2) for t in heads[:, :, H:].chunk(2, dim=2))
    if option == "window":
        phases = rotary_phases(torch.arange(L), P, 10_000.0, 1.0, torch.float64)
        q, k = rotate(q, *phases), rotate(k, *phases)
    weights = (torch.einsum("blhp,bshp->bhls", q, k) / math.sqrt(P) + bias).softmax(-1)
    y = torch.einsum("bhls,bshp->blhp", weights, v).reshape(2, L, D)
    torch.testing.assert_close(mixer(x), mixer.out_proj(y), **EXACT)


def test_hard_alibi_takes_so_many_heads():
    assert Attention(D, positions="hard_alibi").windows == (1, 2, None, None)
    assert Attention(D, positions="hard_alibi", hard_alibi_heads=3, window=9).windows == (1, 2, 3, 9)
    assert Attention(D, positions="alibi").slopes == alibi_slopes(4)


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(d_model=100, n_heads=3), ["100", "3"]),
        (dict(d_model=24, n_heads=0), ["24", "0"]),
        (dict(d_model=24, n_heads=8), ["24", "8", "head of 3", "0.667"]),
        (dict(d_model=24, n_heads=4, n_kv_heads=3), ["n_kv_heads=3", "n_heads=4"]),
        (dict(d_model=24, positions="sinusoidal"), ["rope, none, alibi, hard_alibi", "'sinusoidal'"]),
        (dict(d_model=24, rotary_fraction=1.5), ["1.5"]),
        (dict(d_model=24, rope_base=1.0), ["rope_base", "1.0"]),
        (dict(d_model=24, rope_scaling="yarn"), ["linear, ntk", "'yarn'"]),
        (dict(d_model=24, rope_factor=0.5), ["rope_factor", "0.5"]),
        (dict(d_model=24, hard_alibi_heads=5), ["0..n_heads = 4", "5"]),
        (dict(d_model=24, window=0), ["window", "0"]),
        (dict(d_model=24, attn_dropout=1.0), ["1.0"]),
        (dict(d_model=24, attn_impl="fast"), ["auto, fa4", "'fast'"]),
        (dict(d_model=24, cache_page=0), ["cache_page", "0"]),
    ],
)
def test_b06_sizes_that_cannot_be_are_refused_when_the_model_is_built(keys, words):
    with pytest.raises(ValueError) as error:
        Attention(**keys)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("d_model, n_heads, keys", [(24, 8, {"rotary_fraction": 0.667}), (257, 1, {"rotary_fraction": 0.5}), (3, 3, {"positions": "none"})])  # fmt: skip  # noqa: E501
def test_b06_odd_heads_work_where_the_rotated_part_is_even(d_model, n_heads, keys):
    mixer = Attention(d_model, n_heads, **keys)
    x = normal(1, 6, d_model, dtype=torch.float32)
    torch.testing.assert_close(steps(mixer, x, mixer.init_state(1))[0], mixer(x), rtol=0, atol=1e-5)


# -- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
def test_b08_rotary_positions_stay_apart(low):
    for start in (255, 4097, 65_536):
        t = torch.arange(start, start + 7)
        cos, sin = rotary_phases(t, 8, 10_000.0, 1.0, low)
        assert cos.dtype == torch.float32
        angle = torch.atan2(sin[:, 0, 0], cos[:, 0, 0]).double()  # the first pair turns by one radian a position
        turned = torch.remainder(angle - t + math.pi, 2 * math.pi) - math.pi
        assert turned.abs().max() < 1e-6 * 2


def test_b08_a_16_bit_model_keeps_its_phases():
    """No buffer of cosines follows `.to()`: what is rotated at 4097 in bfloat16 is what float32 rotates."""
    mixer = make(dtype=torch.float32)
    x = normal(1, 1, D, dtype=torch.float32)
    at = torch.tensor([4097])
    q, k, _ = mixer._project(x, at)
    q16, k16, _ = mixer.to(torch.bfloat16)._project(x.bfloat16(), at)
    for a, b in ((q, q16), (k, k16)):
        assert b.dtype == torch.bfloat16
        torch.testing.assert_close(a, b.float(), rtol=0, atol=0.03 * a.abs().max().item())


def test_rotation_sees_distances_alone():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=2)

    def score(t, s):
        (a, b), (c, d) = (rotary_phases(torch.tensor([at]), 8, 10_000.0, 1.0, q.dtype) for at in (t, s))
        return (rotate(q, a, b) * rotate(k, c, d)).sum()

    torch.testing.assert_close(score(5, 2), score(1005, 1002), **EXACT)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3


def test_scaled_phases():
    """linear: position 4t is what t was. ntk: the slowest pair is, the fastest stays as it was."""

    def angle(t, **keys):
        mixer = Attention(32, 4, **keys)
        cos, sin = rotary_phases(torch.tensor([t]), 8, mixer.rope_base, mixer.rope_shrink, torch.float64)
        return torch.atan2(sin, cos).flatten()

    plain, four = dict(), dict(rope_factor=4.0)
    torch.testing.assert_close(angle(8, **four), angle(2, **plain), **EXACT)
    ntk = dict(rope_factor=4.0, rope_scaling="ntk")
    torch.testing.assert_close(angle(8, **ntk)[-1], angle(2, **plain)[-1], **EXACT)
    torch.testing.assert_close(angle(8, **ntk)[0], angle(8, **plain)[0], **EXACT)


# -- the cache --------------------------------------------------------------------------------------------------------


@over_options
@pytest.mark.parametrize("sizes", [[37], [1] * 37, [2, 35], [3, 1, 33], [36, 1], [0, 5, 0, 32]], ids=str)
@torch.no_grad()
def test_d01_any_pieces_are_one(option, sizes):
    mixer, x = make(option), normal(2, 37, D)
    y, state = pieces(mixer, x, sizes)
    torch.testing.assert_close(y, mixer(x), **EXACT)
    _, whole = mixer.prefill(x, mixer.init_state(2))
    for a, b in zip(state, whole, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@over_options
def test_d01_gradients_cross_the_cut(option):
    mixer, weight = make(option), normal(2, 9, D, seed=2)
    grads = []
    for forward in (mixer, lambda x: pieces(mixer, x, [2, 1, 6])[0]):
        x = normal(2, 9, D).requires_grad_()
        mixer.zero_grad()
        (forward(x) * weight).sum().backward()
        grads.append([x.grad, *(p.grad for p in mixer.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@over_options
@torch.no_grad()
def test_d02_rows_of_different_lengths(option):
    """Right-padded prompts in one batch, cut to their lengths, decode as each does alone; also in further pieces."""
    mixer, x, lengths = make(option), normal(3, 12, D), (12, 5, 1)
    more = normal(3, 7, D, seed=5)
    _, state = mixer.prefill(x, mixer.init_state(3))
    state = state._replace(length=torch.tensor(lengths, dtype=torch.int32))
    y, after = pieces(mixer, more, [1, 4, 2], state)
    assert after.length.tolist() == [n + 7 for n in lengths]
    for row, n in enumerate(lengths):
        _, alone = mixer.prefill(x[row : row + 1, :n], mixer.init_state(1))
        want, _ = pieces(mixer, more[row : row + 1], [1, 4, 2], alone)
        torch.testing.assert_close(y[row : row + 1], want, **EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
@over_options
@torch.no_grad()
def test_b10_padding_on_either_side_changes_nothing(option, side):
    mixer, x = make(option), normal(2, 9, D)
    pads = 1e3 * normal(2, 9, D, seed=7)
    index = torch.zeros(2, 18, dtype=torch.long)
    if side == "left":
        padded, real = torch.cat((pads, x), 1), slice(9, 18)
    else:
        padded, real = torch.cat((x, pads), 1), slice(0, 9)
    index[:, real] = 1
    torch.testing.assert_close(mixer(padded, index)[:, real], mixer(x), **EXACT)
    assert (mixer(padded)[:, real] - mixer(x)).abs().max() > 1e-3 or side == "right"


@over_options
@torch.no_grad()
def test_packed_documents_are_documents_alone(option):
    mixer, x = make(option), normal(1, 20, D)
    index = torch.tensor([[4] * 6 + [2] * 1 + [4] * 13])  # an index that comes back is another document
    y = mixer(x, index)
    for first, end in ((0, 6), (6, 7), (7, 20)):
        torch.testing.assert_close(y[:, first:end], mixer(x[:, first:end]), **EXACT)


def tangled(mixer, continue_with):
    """Two continuations of one kept state, a token of each in turn."""
    x, branches = normal(2, 9, D), (normal(2, 6, D, seed=3), normal(2, 6, D, seed=4))
    _, kept = mixer.prefill(x, mixer.init_state(2))
    states, outs = [kept, kept], ([], [])
    for t in range(6):
        for i, branch in enumerate(branches):
            y, states[i] = continue_with(branch[:, t], states[i])
            outs[i].append(y)
    return x, branches, [torch.stack(out, 1) for out in outs], kept


@pytest.mark.parametrize("option", ["rope", "small pages"])
@torch.no_grad()
def test_d03_states_are_values(option):
    """Writing into spare room never shows: branches taken in turn, from one kept state, each equal a run of their own."""
    mixer = make(option)
    x, branches, outs, kept = tangled(mixer, mixer.step)
    for branch, out in zip(branches, outs, strict=True):
        torch.testing.assert_close(out, mixer(torch.cat((x, branch), 1))[:, 9:], **EXACT)
    again, _ = steps(mixer, branches[1], kept)
    assert torch.equal(again, outs[1])


@torch.no_grad()
def test_d03_every_way_to_another_state_is_safe():
    """Cut shorter, rows taken out, reordered or repeated, copied: what is continued afterwards disturbs nobody."""
    mixer, x, more = make(), normal(3, 9, D), normal(3, 4, D, seed=3)
    _, kept = mixer.prefill(x, mixer.init_state(3))
    ways = {
        "cut": (lambda s: s._replace(length=s.length - 3), slice(None), 6),
        "a view of two rows": (lambda s: AttentionState(*(t[1:] for t in s)), slice(1, 3), 9),
        "reordered": (lambda s: AttentionState(*(t[torch.tensor([2, 0, 0])] for t in s)), [2, 0, 0], 9),
        "copied": (copy.deepcopy, slice(None), 9),
        "detached": (lambda s: AttentionState(*(t.detach() for t in s)), slice(None), 9),
        "reserved": (lambda s: s.reserve(1000), slice(None), 9),
    }
    for name, (change, rows, n) in ways.items():
        other = change(kept)
        y, _ = steps(mixer, more[: len(other.length)], other)
        whole = mixer(torch.cat((x[rows][:, :n], more[: len(other.length)]), 1))[:, n:]
        torch.testing.assert_close(y, whole, **EXACT, msg=name)
    y, _ = steps(mixer, more, kept)
    torch.testing.assert_close(y, mixer(torch.cat((x, more), 1))[:, 9:], **EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("impl", ["auto", "math"])
@pytest.mark.parametrize("way", ["step", "prefill"])
def test_a_length_changed_in_place_is_read_again(mode, impl, way):
    """What is remembered of a tensor holds for one version of it."""
    mixer, x, more = make(), normal(3, 9, D), normal(3, 4, D, seed=3)
    mixer.attn_impl = impl
    with mode():
        _, state = mixer.prefill(x, mixer.init_state(3))
        state.length.sub_(8)
        y, _ = steps(mixer, more, state) if way == "step" else mixer.prefill(more, state)
        torch.testing.assert_close(y, mixer(torch.cat((x[:, :1], more), 1))[:, 1:], **EXACT)


@torch.no_grad()
def test_states_that_another_process_saved_stay_values(tmp_path):
    """Two states that share a cache are saved; a process that starts from them gives out no ticket that they have."""
    code = """if True:
        import sys, torch
        from seqmix.mixers.attention import Attention, AttentionState
        torch.manual_seed(0)
        mixer, x = Attention(8), torch.linspace(-1, 1, 64).view(1, 8, 8)
        with torch.no_grad():
            if sys.argv[2] == "save":
                _, early = mixer.prefill(x[:, :3], mixer.init_state(1))
                _, late = mixer.step(x[:, 3], early)
                torch.save([tuple(early), tuple(late)], sys.argv[1])
            else:
                early, late = (AttentionState(*state) for state in torch.load(sys.argv[1]))
                for t in (4, 5):  # the first tickets of a process, counted from 0, would be 0 and 1: early has 1
                    _, late = mixer.step(x[:, t], late)
                mixer.step(-x[:, 0], early)
                y, _ = mixer.step(x[:, 6], late)
                torch.testing.assert_close(y, mixer(x)[:, 6])
    """
    for what in ("save", "load"):
        done = subprocess.run([sys.executable, "-c", code, tmp_path / "states.pt", what], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@torch.no_grad()
def test_a_state_of_inference_mode_is_continued_outside_it():
    mixer, x = make(), normal(2, 10, D)
    with torch.inference_mode():
        _, state = mixer.prefill(x[:, :8], mixer.init_state(2))
    y, state = mixer.step(x[:, 8], state)
    with torch.inference_mode():
        z, _ = mixer.step(x[:, 9], state)
    torch.testing.assert_close(torch.stack((y, z), 1), mixer(x)[:, 8:], **EXACT)


@pytest.mark.parametrize("positions", ["rope", "alibi", "hard_alibi"])
def test_a_pass_without_numbers_leaves_nothing_behind(positions):
    keys = dict(n_heads=4, positions=positions, rope_base=4321.0, attn_impl="math", window=5)  # a base that nobody else has
    with FakeTensorMode():
        Attention(D, **keys)(torch.zeros(1, 9, D))
    mixer, x = Attention(D, **keys), normal(1, 9, D, dtype=torch.float32)
    assert mixer(x).isfinite().all()
    with FakeTensorMode(allow_non_fake_inputs=False):  # and what was kept does not get in
        Attention(D, **keys)(torch.zeros(1, 9, D))


@torch.no_grad()
def test_the_cache_grows_by_pages_and_writes_in_place():
    mixer = make(dtype=torch.float32, cache_page=8)
    x, state = normal(1, 30, D, dtype=torch.float32), mixer.init_state(1)
    assert state_bytes(state) == 4
    places, sizes = [], []
    for x_t in x.unbind(1):
        _, state = mixer.step(x_t, state)
        places.append(state.k.data_ptr())
        sizes.append(state.k.shape[2])
    assert sizes == [8] * 8 + [16] * 8 + [24] * 8 + [32] * 6
    moves = [i for i in range(1, 30) if places[i] != places[i - 1]]
    assert moves == [8, 16, 24]  # a new buffer where a page is full, and nowhere else
    assert state_bytes(state) == 2 * 32 * D * 4 + 4
    full = state.reserve(50)
    assert full.k.shape[2] == 80 and full.reserve(50) is full
    for x_t in normal(1, 50, D, dtype=torch.float32).unbind(1):
        address = full.k.data_ptr()
        _, full = mixer.step(x_t, full)
        assert full.k.data_ptr() == address and full.k.shape[2] == 80


@torch.no_grad()
def test_grouped_queries_shrink_the_cache():
    full, grouped = (Attention(D, n_heads=4, n_kv_heads=n) for n in (4, 1))
    x = normal(1, 5, D, dtype=torch.float32)
    a, b = (state_bytes(m.prefill(x, m.init_state(1))[1]) - 4 for m in (full, grouped))
    assert a == 4 * b


@torch.no_grad()
def test_the_cache_is_in_the_dtype_of_what_comes_first():
    mixer, x = make(dtype=torch.float32), normal(1, 9, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = mixer.prefill(x, mixer.init_state(1))
        _, state = mixer.step(x[:, 0], state)
    assert state.k.dtype == state.v.dtype == torch.bfloat16


@over_options
@torch.inference_mode()
def test_one_graph_decodes_a_page(option):
    """torch.compile(fullgraph) over a step: no number is asked of the device and no shape changes, at any length."""
    mixer, x = make(option, dtype=torch.float32), normal(2, 20, D, dtype=torch.float32)
    _, state = mixer.prefill(x[:, :9], mixer.init_state(2))
    state = state._replace(length=torch.tensor([9, 4], dtype=torch.int32)).reserve(20)
    eager, _ = steps(mixer, x[:, 9:], state)
    torch._dynamo.reset()
    seen = []

    def backend(graph, examples):
        seen.append(graph)
        return graph.forward

    step = torch.compile(mixer.step, backend=backend, fullgraph=True, dynamic=False)
    _, state = mixer.step(x[:, 9], state)
    address = state.k.data_ptr()
    for t in range(10, 20):
        y, state = step(x[:, t], state)
        torch.testing.assert_close(y, eager[:, t - 9])
    assert len(seen) == 1 and state.k.data_ptr() == address
    assert state.length.tolist() == [20, 15]


def test_b02_dropout_is_for_training_alone():
    mixer, x = Attention(D, attn_dropout=0.5).eval(), normal(2, 9, D, dtype=torch.float32)
    assert torch.equal(mixer(x), mixer(x))
    torch.testing.assert_close(mixer(x), pieces(mixer, x, [4, 5])[0], rtol=0, atol=1e-6)
    mixer.train()
    assert not torch.equal(mixer(x), mixer(x))


# -- a model, and a run -----------------------------------------------------------------------------------------------


def model(option, **keys):
    torch.manual_seed(0)
    return SequenceModel(V, D, 2, partial(Attention, **(keys | OPTIONS[option])), partial(SwiGLU, expand=2)).eval()


@over_options
def test_d03_d05_d06_generation(option):
    net, prompt = model(option, cache_page=4), torch.randint(V, (2, 3), generator=torch.Generator().manual_seed(1))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    out = net.generate(prompt, 12, temperature=0)
    assert torch.equal(out, net.generate(prompt, 12, temperature=1e-8))
    expected = prompt
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat((expected, net(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(out, expected)
    draws = [net.generate(prompt, 9, top_k=10 * V, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert net.generate(prompt[:, :1], 1).shape == (2, 2) and torch.equal(net.generate(prompt, 0), prompt)
    with pytest.raises(ValueError, match=r"at least one token per row, got shape \(2, 0\)"):
        net.generate(prompt[:, :0], 1)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@torch.no_grad()
def test_a_state_of_a_model_is_reordered_by_its_tensors():
    """As a beam search does: row 2 and row 0 go on, row 1 ends."""
    net, tokens = model("rope"), torch.randint(V, (3, 9), generator=torch.Generator().manual_seed(1))
    _, state = net.prefill(tokens[:, :6], net.init_state(3))
    order = torch.tensor([2, 0])
    state = tuple(type(block)(*(t.index_select(0, order) for t in block)) for block in state)
    logits, state = net.prefill(tokens[order, 6:], state)
    torch.testing.assert_close(logits, net(tokens[order])[:, 6:], rtol=0, atol=1e-5)
    assert state_bytes(state) == sum(t.numel() * t.element_size() for t in tensors(state))


def test_a_run_leaves_what_computed_attention_and_the_bytes_of_the_cache(tmp_path):
    runs.start(tmp_path / "run", "model=transformer", "task=selective_copy", *runs.SELECTIVE_COPY, "model.cache_page=16")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["kernels"]["attention"].startswith("flash (fa4: flash-attn-4 (the extra `gpu`")
    pages = -(-summary["data"]["seq_len"] // 16) if "seq_len" in summary["data"] else 1
    assert summary["memory/state_bytes"] == 2 * 16 * 16 * pages * 4 + 4


def test_b04_a_run_that_cannot_have_its_kernel_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"impl='fa4' cannot run here: flash-attn-4 \(the extra `gpu`.* needs an NVIDIA GPU"):
        runs.start(tmp_path / "run", "model=transformer", "task=selective_copy", *runs.SELECTIVE_COPY, "model.attn_impl=fa4")


@pytest.mark.slow
def test_a_job_of_a_sweep_that_cannot_have_its_kernel_fails_before_its_first_batch(tmp_path):
    kernels = "model.attn_impl=fa4,math"
    done = runs.command(tmp_path, "logger=csv", *runs.SELECTIVE_COPY, "model=transformer", kernels, multirun=True)
    assert done.returncode == 1, done.stderr
    found = {"fa4": None, "math": None}
    for file in tmp_path.glob("outputs/sweeps/*/*/summary.json"):
        (name,) = (name for name in found if f"attn_impl={name}" in (file.parent / ".hydra/overrides.yaml").read_text())
        found[name] = json.loads(file.read_text())
        assert (file.parent / "metrics.csv").exists() == (name == "math")
    assert found["math"]["status"] == "complete" and found["math"]["kernels"]["attention"] == "math (asked for)"
    assert found["fa4"]["status"] == "failed" and "needs an NVIDIA GPU, q is on the CPU" in found["fa4"]["error"]
