"""How Mamba uses its kernels: levels of what is kept, the choice of a step, projections that are no plain layers.

Its equation, its start and the laws of every mixer are in test_mixers.py.
"""

import pytest
import torch
from torch import nn

from seqmix.mixers.mamba import Mamba
from seqmix_kernels.ops.mamba_inner import LEVELS
from seqmix_kernels.ops.selective_scan.op import why_not

D = 24
needs_compiler = pytest.mark.skipif(why_not("cpu", torch.zeros(1)) is not None, reason="no C compiler")


def make(dtype=torch.float32, **keys):
    torch.manual_seed(0)
    mixer = Mamba(D, **keys)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.02 * torch.randn_like(p)
    return mixer.to(dtype)


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradients(mixer, x):
    """Of a random weighting of the outputs and the state of a prefill in two pieces: x's, then the parameters'."""
    mixer.zero_grad()
    x = x.clone().requires_grad_()
    first, state = mixer.prefill(x[:, :5], mixer.init_state(len(x)))
    second, state = mixer.prefill(x[:, 5:], state)
    loss = sum((t * normal(*t.shape, dtype=t.dtype, seed=i)).sum() for i, t in enumerate((first, second, *state)))
    loss.backward()
    return [x.grad, *(p.grad for p in mixer.parameters())]


def steps(mixer, x):
    state, ys = mixer.init_state(len(x)), []
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, state)
        ys.append(y_t)
    return torch.stack(ys, dim=1)


class Adapted(nn.Linear):
    """A layer with a low-rank addition, as adapters make them."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.weight.dtype)
        self.load_state_dict(layer.state_dict())
        self.down = nn.Parameter(0.1 * normal(2, layer.in_features, dtype=layer.weight.dtype, seed=3))
        self.up = nn.Parameter(0.1 * normal(layer.out_features, 2, dtype=layer.weight.dtype, seed=4))

    def forward(self, x):
        return super().forward(x) + x @ self.down.t() @ self.up.t()

    def merged(self):
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, dtype=self.weight.dtype)
        layer.weight.data, layer.bias = self.weight.data + self.up.data @ self.down.data, self.bias
        return layer


@pytest.mark.parametrize("scan", ["sequential", pytest.param("cpu", marks=needs_compiler)])
def test_gradients_are_the_same_at_every_level(scan):
    x = normal(2, 13, D)
    first, *others = (gradients(make(scan=scan, checkpoint_level=level), x) for level in LEVELS)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@needs_compiler
def test_levels_keep_less_and_less():
    x, counts = normal(2, 64, D), []
    for level in LEVELS:
        seen, mixer = {}, make(checkpoint_level=level)

        def pack(t, seen=seen):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mixer(x)
        for own in (x, *mixer.parameters()):
            seen.pop(own.untyped_storage().data_ptr(), None)
        counts.append(sum(seen.values()))
    assert counts[0] > 1.4 * counts[1] > counts[2] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["in_proj", "x_proj", "dt_proj", "out_proj"])
def test_an_adapter_is_called_not_read_through(name, level):
    plain, adapted = make(torch.float64), make(torch.float64, checkpoint_level=level)
    setattr(adapted, name, Adapted(getattr(adapted, name)))
    setattr(plain, name, getattr(adapted, name).merged())
    x = normal(2, 9, D, dtype=torch.float64)
    for f in (lambda m: m(x), lambda m: steps(m, x)):
        torch.testing.assert_close(f(adapted), f(plain), rtol=0, atol=1e-12)
    adapted(x).sum().backward()
    layer = getattr(adapted, name)
    assert layer.down.grad.abs().sum() > 0 and layer.up.grad.abs().sum() > 0


def test_hooks_of_a_projection_run():
    mixer, seen = make(), []
    mixer.dt_proj.register_forward_hook(lambda module, given, made: seen.append(made.shape))
    y = mixer(normal(2, 9, D))
    mixer.step(normal(2, D), mixer.init_state(2))
    assert seen == [(2, 9, 2 * D), (2, 1, 2 * D)]
    torch.testing.assert_close(y, make()(normal(2, 9, D)))


def test_a_counter_of_flops_sees_the_projections():
    from torch.utils.flop_counter import FlopCounterMode

    mixer, x = make(), normal(2, 9, D)
    projections = sum(m.weight.numel() for m in (mixer.in_proj, mixer.x_proj, mixer.dt_proj, mixer.out_proj))
    for call, tokens in ((lambda: mixer(x), 18), (lambda: mixer.step(x[:, 0], mixer.init_state(2)), 2)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == 2 * tokens * projections


@pytest.mark.parametrize("level", LEVELS)
def test_compiles_without_a_break(level):
    mixer, x = make(checkpoint_level=level), normal(2, 13, D)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, mixer(x))
    (y * normal(*y.shape, seed=5)).sum().backward()
    got = [p.grad for p in mixer.parameters()]
    mixer.zero_grad()
    (mixer(x) * normal(*y.shape, seed=5)).sum().backward()
    for a, p in zip(got, mixer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_a_step_compiles_without_a_break():
    mixer, x = make().eval(), normal(2, D)
    with torch.no_grad():
        _, state = mixer.prefill(normal(2, 7, D), mixer.init_state(2))
        wanted = mixer.step(x, state)
        got = torch.compile(mixer.step, fullgraph=True, backend="aot_eager")(x, state)
    torch.testing.assert_close(got[0], wanted[0])
    for a, b in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_state_keeps_its_dtypes(weights):
    """A graph of a step writes the new state where the old one was."""
    mixer = make().eval()
    for part in (mixer.in_proj, mixer.x_proj, mixer.dt_proj, mixer.out_proj):
        part.to(weights)
    state = mixer.init_state(2)
    assert [t.dtype for t in state] == [weights, torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        _, after = mixer.prefill(normal(2, 5, D), state)
        _, later = mixer.step(normal(2, D), after)
    for new in (after, later):
        assert [(t.dtype, t.shape) for t in new] == [(t.dtype, t.shape) for t in state]


@pytest.mark.parametrize(
    "keys, words",
    [(dict(checkpoint_level=3), "one of 0, 1, 2, got 3"), (dict(decode="magic"), "auto, reference, fused, got 'magic'")],
)
def test_refuses_what_cannot_be(keys, words):
    with pytest.raises(ValueError, match=words):
        Mamba(D, **keys)


def test_a_step_that_cannot_run_says_why():
    mixer = make(decode="fused")
    with pytest.raises(ValueError, match="impl='fused' cannot run here: it has no gradient"):
        mixer.step(normal(2, D), mixer.init_state(2))
    with torch.no_grad(), pytest.raises(ValueError, match="cannot run here: it needs a CUDA device, the tensors are on cpu"):
        mixer.step(normal(2, D), mixer.init_state(2))
