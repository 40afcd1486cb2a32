"""Timing and counting, on clocks that lie in known ways."""

from __future__ import annotations

import math
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from seqmix import measure


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_window_counts_what_ran_inside_it_and_nothing_of_the_pauses():
    clock = Clock()
    timer = measure.WindowTimer(synchronize=lambda: None, clock=clock)
    clock.sleep(1000)  # before the window
    timer.resume(clock())
    clock.sleep(2)
    timer.add(steps=1, tokens=64, data_seconds=0.5)
    timer.pause()
    clock.sleep(1000)  # evaluation
    timer.resume(clock())
    timer.resume(clock() + 1)  # a second one changes nothing
    clock.sleep(3)
    timer.add(steps=1, tokens=64, data_seconds=0.25)
    assert timer.close() == measure.Window(seconds=5, data_seconds=0.75, steps=2, tokens=128)
    assert timer.close() == measure.Window(0, 0, 0, 0), "the next window starts from nothing"


def test_work_still_queued_on_the_device_is_paid_inside_the_window():
    clock = Clock()
    queued = [4.0]
    timer = measure.WindowTimer(synchronize=lambda: clock.sleep(queued.pop() if queued else 0), clock=clock)
    timer.resume(clock())
    clock.sleep(1)  # the host has launched, the device has 4 s to go
    timer.add(steps=1)
    assert timer.close().seconds == 5


def test_the_device_is_synchronised_at_edges_only():
    waits = []
    timer = measure.WindowTimer(synchronize=lambda: waits.append(1), clock=Clock())
    timer.resume(0.0)
    for _ in range(50):
        timer.add(steps=1, tokens=8)
    assert not waits
    timer.close()
    assert len(waits) == 1
    timer.pause()
    timer.discard()
    assert len(waits) == 1, "a clock that stands has nothing to wait for"


class Device:
    """A queue that works later than it is given work: a mark is in the queue, so its moment is when the work before it is
    done; the host's clock passes only while it launches, and where it waits."""

    def __init__(self, clock: Clock, launch: float = 0.0):
        self.clock, self.launch, self.done, self.waits = clock, launch, clock.now, 0

    def work(self, seconds: float) -> None:
        self.clock.sleep(self.launch)
        self.done = max(self.done, self.clock.now) + seconds

    def mark(self) -> float:
        return max(self.done, self.clock.now)

    def milliseconds(self, before: float, after: float) -> float:
        return 1e3 * (after - before)

    def synchronize(self) -> None:
        self.waits += 1
        self.clock.now = max(self.clock.now, self.done)


def timed(device: Device, phases: dict, **settings) -> measure.Timing:
    return measure.time_calls(
        phases, torch.device("cuda"), marks=device, synchronize=device.synchronize, clock=device.clock, **settings
    )


def test_a_call_is_timed_in_its_parts_where_the_device_works_not_where_the_host_launches():
    device = Device(Clock(), launch=0.001)
    phases = {"forward": lambda: device.work(0.25), "backward": lambda: device.work(0.5)}
    timing = timed(device, phases, seconds=7.5)
    assert timing.whole.count == 10 - 1, "as many as fit into the seconds, by the last call of the warm-up"
    assert timing.phases["forward"].median == pytest.approx(250) and timing.phases["backward"].median == pytest.approx(500)
    assert timing.whole.median == pytest.approx(750) and timing.whole.iqr == pytest.approx(0, abs=1e-6)


def test_where_the_host_is_slower_than_the_device_its_launches_are_the_time():
    device = Device(Clock(), launch=0.004)
    timing = timed(device, {"step": lambda: device.work(0.001)}, seconds=0.1)
    assert timing.whole.median == pytest.approx(4), "the device has its 1 ms done while the host launches the next"


def test_the_first_call_is_apart_and_the_warm_up_in_neither():
    device, durations = Device(Clock()), [9.0, 2.0, *[0.5] * 100]
    timing = timed(device, {"call": lambda: device.work(durations.pop(0))}, seconds=3, warmup=2, limit=100)
    assert timing.first_ms == pytest.approx(9000)
    assert timing.whole == pytest.approx(measure.Spread(500, 0, 6))


def test_what_comes_before_and_between_calls_is_not_on_the_clock():
    device = Device(Clock())
    order = []

    def note(what: str, seconds: float):
        def run():
            order.append(what)
            device.work(seconds)

        return run

    timing = timed(
        device, {"call": note("call", 0.5)}, seconds=1, least=2, before=note("before", 3.0), between=note("between", 7.0),
        after_warmup=lambda: order.append("warm"), limit=100,
    )  # fmt: skip
    assert timing.whole.median == pytest.approx(500)
    assert order == ["before", "call"] * 2 + ["warm"] + ["before", "call", "between"] * 2


def test_the_host_waits_around_the_timed_calls_and_not_among_them():
    device = Device(Clock())
    waits = []
    timed(device, {"call": lambda: device.work(0.01)}, seconds=1, between=lambda: waits.append(device.waits))
    assert len(set(waits)) == 1


def test_calls_longer_than_the_limit_are_timed_once():
    device = Device(Clock())
    timing = timed(device, {"call": lambda: device.work(20.0)}, seconds=1, least=3, limit=10)
    assert timing.whole == pytest.approx(measure.Spread(20_000, 0, 1)) and device.clock.now == pytest.approx(140)


@pytest.mark.parametrize(("seconds", "fit"), [(3.0, 2), (2.0, 3), (4.0, 1)])
def test_long_calls_are_timed_as_often_as_fits_into_the_limit_however_long_the_first_took(seconds, fit):
    device, durations = Device(Clock()), [9.0, *[seconds] * 10]
    timing = timed(device, {"call": lambda: device.work(durations.pop(0))}, seconds=0.1, least=3, limit=7)
    assert timing.whole == pytest.approx(measure.Spread(1e3 * seconds, 0, fit)) and timing.first_ms == pytest.approx(9000)
    assert len(durations) == 10 - fit, "no warm-up"


def test_where_the_first_call_alone_is_long_the_second_is_the_warm_up():
    device, durations, begun = Device(Clock()), [9.0, 0.7, *[0.5] * 100], []
    timing = timed(
        device,
        {"call": lambda: device.work(durations.pop(0))},
        seconds=3.6,
        limit=7,
        after_warmup=lambda: begun.append(len(durations)),
    )
    assert timing.whole == pytest.approx(measure.Spread(500, 0, 5)) and begun[-1] == 100, "where the timed calls begin"


def test_sensors_are_read_now_and_then_and_give_medians():
    clock, readings = Clock(), iter([{"watts": 100.0, "sm_mhz": 1980.0}, {"watts": 700.0}, {"watts": 300.0}])
    sensors = measure.Sensors(torch.device("cuda"), read=lambda: next(readings), every=1.0, clock=clock)
    for _ in range(5):
        sensors()
        clock.sleep(0.5)
    assert sensors.summary() == {"sm_mhz": 1980.0, "watts": 300.0}
    nothing = measure.Sensors(torch.device("cpu"))
    nothing()
    assert nothing.summary() == {}


def test_spread_is_median_interquartile_range_and_count():
    assert measure.spread([]) == (None, None, 0)
    assert measure.spread([7.0]) == (7.0, 0.0, 1)
    values = [9.0, 1.0, 4.0, 100.0, 5.0, 2.0]
    truth = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    median, iqr, count = measure.spread(values)
    assert count == 6
    assert median == pytest.approx(truth[1].item(), rel=1e-15)
    assert iqr == pytest.approx((truth[2] - truth[0]).item(), rel=1e-15)


def test_a_tied_head_counts_once_and_embeddings_can_be_left_out():
    model = nn.Module()
    model.embedding = nn.Embedding(11, 4)
    model.inner = nn.Linear(4, 4)
    model.head = nn.Linear(4, 11, bias=False)
    model.head.weight = model.embedding.weight
    assert measure.parameter_count(model) == (11 * 4 + 20, 20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_nonfinite_element_is_found_and_large_finite_ones_are_not(bad, dtype, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    largest = torch.finfo(dtype).max
    fine = [torch.full((7,), largest, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(3, 2)]
    fine = [tensor.to(device) for tensor in fine]
    assert bool(measure.all_finite(fine)), "a 2-norm would overflow here"
    broken = [*fine[:2], torch.ones(3, 2, device=device)]
    broken[2][1, 1] = bad
    assert not bool(measure.all_finite(broken))
    names = list(zip("abc", broken, strict=True))
    assert measure.first_nonfinite([("none", None), *names]) == "c"
    assert measure.first_nonfinite(zip("abc", fine, strict=True)) is None


def test_complex_and_double_tensors_are_judged_by_their_own_range():
    large = torch.full((3,), 1e300, dtype=torch.float64)
    assert bool(measure.all_finite([torch.ones(2), large]))
    assert bool(measure.all_finite([torch.ones(2, dtype=torch.complex64)]))
    assert not bool(measure.all_finite([torch.ones(2), torch.tensor([1.0 + 1j * math.inf])]))


def test_of_a_tensor_shared_out_over_ranks_this_ranks_share_is_judged():
    class Shared:  # what a DTensor has
        def __init__(self, share: float):
            self.share = share

        def to_local(self):
            return torch.tensor([self.share])

    assert bool(measure.all_finite([Shared(1.0), torch.ones(2)]))
    assert not bool(measure.all_finite([torch.ones(2), Shared(math.inf)]))


def test_no_tensors_are_finite():
    assert bool(measure.all_finite([])) and bool(measure.all_finite([torch.zeros(0)]))


def test_environment_names_versions_and_no_host_or_path(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: pytest.fail("asked for the host's name"))
    facts = measure.environment(torch.device("cpu"))
    assert facts["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()
    assert facts["cuda"] == torch.version.cuda and facts["device"] == "cpu" and facts["device_name"]
    assert not any("/home" in str(value) or str(value).startswith("/") for value in facts.values())


def test_importing_the_measures_imports_neither_wandb_nor_triton():
    code = "import sys, seqmix.measure; print([m for m in ('wandb', 'triton', 'flash_attn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
