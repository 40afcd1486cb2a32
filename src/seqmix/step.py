"""One optimizer step, from a batch to new weights; with a fused optimizer the host never waits for the device.

    total  =  scored tokens of the step, over micro-batches and ranks
    loss   =  Σ losses / total                          one micro-batch after another, gradients accumulated
    norm   =  ‖gradients‖, which are clipped to gradient_clip_val
    bad    =  loss or norm is not finite                the optimizer then leaves weights and its state as they are

On a GPU the whole step is captured as one CUDA graph after a few eager steps, and replayed from then on. A step of a small
model is some three hundred kernels of a few microseconds each; to launch them one by one takes the host ten times as long
as they run. Eager and replayed steps are the same kernels in the same order: their losses and weights are bitwise equal.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from seqmix.graphs import Graph
from seqmix.measure import all_finite, first_nonfinite
from seqmix.metrics import IGNORE, ScoredTokens

log = logging.getLogger(__name__)
WARMUP = 3  # eager steps per shape before its capture, which must not contain one-time compilation, tuning or allocation


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite.

    step: optimizer steps done before the bad one. lr: of the first parameter group. grad_norm: 2-norm over all
    gradients. tensor: name of the first tensor that is not finite, among the parameters, the loss and the gradients, in
    this order.
    """

    def __init__(self, step: int, lr: float, grad_norm: float, tensor: str, detail: str):
        self.step, self.lr, self.grad_norm, self.tensor = step, lr, grad_norm, tensor
        super().__init__(
            f"not finite after {step} steps: {tensor} (lr {lr:.3g}, gradient norm {grad_norm:.3g}; {detail}). "
            "A lower optimizer.lr or gradient_clip_val may help."
        )


class TrainingStep:
    """Each call with a batch trains `model` by one step.

    window: accumulates the metrics of each step. micro_batch_size: rows per forward and backward pass, None for all.
    gradient_clip_val: None or 0 does not clip. patience: after this many bad steps in a row the weights are no longer
    changed and `check` raises; None does not look for bad steps, which then spoil the weights. scaler: for float16 gradients,
    whose overflow is then not a bad step. no_graph: why steps must not be captured, or None. taken: steps so far. named: the
    parameters that the optimizer trains; None reads them from the model, where FSDP replaces them by gathered ones while it
    computes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        window: ScoredTokens,
        *,
        micro_batch_size: int | None = None,
        gradient_clip_val: float | None = None,
        patience: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        no_graph: str | None = None,
        taken: int = 0,
        named: list[tuple[str, nn.Parameter]] | None = None,
    ):
        self.model, self.optimizer, self.window = model, optimizer, window
        self.micro_batch_size, self.gradient_clip_val, self.patience = micro_batch_size, gradient_clip_val, patience
        self.scaler = scaler
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.named = named or [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.judged: list[str] = []  # names of the parameters that have gradients
        self.sharded = hasattr(self.named[0][1], "full_tensor")  # FSDP's own hooks reduce gradients over the ranks
        # torch's fused optimizers can scale gradients and skip a step on the device; torch made this for its gradient scaler
        self.skips_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        device = next(model.parameters()).device
        self.no_graph = no_graph or self._why_no_graph(device)
        self.first = self.taken = taken
        self.rates = torch.zeros(len(optimizer.param_groups), device=device)  # learning rates of the step, one per group
        self.bad_steps = torch.zeros((), dtype=torch.int32, device=device)  # in a row; from `patience` on it only grows
        # loss, lr and norms of the last step, or of the one at which patience ran out
        self.report = torch.full((2,), math.nan, device=device)
        self.side = torch.cuda.Stream(device) if self.no_graph is None else None
        self.seen: dict[torch.Size, int] = {}
        self.graphs: dict[torch.Size, Graph] = {}
        self.captured_bytes = 0  # peak of allocated memory during captures, which is what replays need
        if self.no_graph is not None and device.type == "cuda":
            log.info("each step is launched kernel by kernel, not as one CUDA graph: %s", self.no_graph)

    @property
    def runs_as(self) -> str:
        return "one CUDA graph per step" if self.no_graph is None else f"kernel by kernel ({self.no_graph})"

    def _why_no_graph(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"CUDA graphs need a GPU, the model is on {device.type}"
        if self.sharded:
            return "FSDP gathers and frees parameters from the host"
        if not self.skips_itself:
            return f"the host must decide whether {type(self.optimizer).__name__} without fused=true skips a step"
        if torch.is_anomaly_enabled():
            return "detect_anomaly checks each result on the host"
        return None

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """inputs, targets: (B, L) int64 on the model's device."""
        self._take_rates()
        self.taken += 1
        if self.no_graph is not None:
            self._run(inputs, targets)
            return
        shape = inputs.shape
        seen = self.seen[shape] = self.seen.get(shape, 0) + 1
        if seen <= WARMUP:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self._run(inputs, targets)
            torch.cuda.current_stream().wait_stream(self.side)
            return
        if shape not in self.graphs and not self._capture(inputs, targets):
            self._run(inputs, targets)
            return
        self.graphs[shape](inputs, targets)

    def _take_rates(self) -> None:
        """Copy the learning rates to the device, where a captured step reads them."""
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float32)
        self.rates.copy_(rates, non_blocking=True)

    def _capture(self, inputs: Tensor, targets: Tensor) -> bool:
        """Capture the step; returns whether that worked. It fails if the model waits for the device; nothing has run then."""
        torch.cuda.reset_peak_memory_stats()
        # no tensor outlives a replay, so the graphs of all shapes can share their memory
        pool = next((other.graph.pool() for other in self.graphs.values()), None)
        try:
            self.graphs[inputs.shape] = Graph(self._run, inputs, targets, pool=pool, stream=self.side)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.no_graph = f"it cannot be captured: {str(error).splitlines()[0]}"
            log.warning("from here on each step runs kernel by kernel: %s", self.no_graph)
            return False
        self.captured_bytes = max(self.captured_bytes, torch.cuda.max_memory_allocated())
        return True

    # The step itself

    def _run(self, inputs: Tensor, targets: Tensor) -> None:
        total = self._over_ranks((targets != IGNORE).sum()).clamp(min=1)
        loss = 0.0
        rows = self.micro_batch_size or len(inputs)
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            losses, right = self.model.score(x, y)  # (B, L) each
            part = (losses.sum(dtype=torch.float64) / total).float()
            loss = loss + part.detach()
            if self.sharded:  # FSDP averages over the ranks
                part = part * self.world_size
            (part if self.scaler is None else self.scaler.scale(part)).backward()
            self.window.update(losses.detach(), right, y)
        loss = self._over_ranks(loss)
        gradients = self._gradients()
        norms = torch.stack(torch._foreach_norm(gradients))  # (parameters,)
        norms = norms.full_tensor() if self.sharded else norms
        norm = torch.linalg.vector_norm(norms)
        self._judge(loss, norms, norm)
        self._update(gradients, norm)
        self.optimizer.zero_grad(set_to_none=True)

    def _over_ranks(self, value: Tensor) -> Tensor:
        """The sum of `value` over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def _gradients(self) -> list[Tensor]:
        """The gradients that exist, summed over the ranks."""
        present = [(name, p) for name, p in self.named if p.grad is not None]
        self.judged, parameters = map(list, zip(*present, strict=True))
        if self.world_size > 1 and not self.sharded:
            flat = self._over_ranks(torch.cat([p.grad.flatten() for p in parameters]))  # one all-reduce
            for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = gradient.view_as(p)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return [p.grad for p in parameters]

    def _judge(self, loss: Tensor, norms: Tensor, norm: Tensor) -> None:
        if self.patience is None:
            return
        current = torch.cat((loss[None], self.rates[:1], norms))
        if self.report.shape != current.shape:  # at the first step
            self.report = current.clone()
        going = self.bad_steps < self.patience
        finite = (loss if self.scaler is not None else loss + norm) < torch.inf  # False for NaN
        self.report.copy_(torch.where(going, current, self.report))
        self.bad_steps.add_(1).masked_fill_(going & finite, 0)

    def _update(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Clip the gradients and step the optimizer; a bad step leaves the weights and the optimizer's state unchanged."""
        skip = None if self.patience is None else self.bad_steps.clamp(max=1).float()
        if self.scaler is not None:
            overflow = 1.0 - (norm < torch.inf).float()
            skip = overflow if skip is None else torch.maximum(skip, overflow)
        shrink = (norm / self.gradient_clip_val).clamp(min=1.0) if self.gradient_clip_val else None
        with self._rates_on_device():
            if self.skips_itself:
                self.optimizer.grad_scale, self.optimizer.found_inf = shrink, skip
                self.optimizer.step()
                del self.optimizer.grad_scale, self.optimizer.found_inf
            elif skip is None or not bool(skip):
                if shrink is not None:
                    torch._foreach_div_(gradients, shrink)
                self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()

    @contextlib.contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """An optimizer that can be captured reads its rates from the device, in eager steps too; others take numbers."""
        if not self.skips_itself:
            yield
            return
        groups = self.optimizer.param_groups
        capturing = self.rates.is_cuda and torch.cuda.is_current_stream_capturing()
        kept = [{key: group[key] for key in ("lr", "capturable") if key in group} for group in groups]
        for group, rate in zip(groups, self.rates.unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = capturing  # torch requires it in a capture, and warns elsewhere
        yield
        for group, values in zip(groups, kept, strict=True):
            group.update(values)

    # Checks on the host

    def check(self) -> None:
        """Raise NonFiniteError if `patience` bad steps came in a row. Waits for the device."""
        if self.patience is not None and (bad := int(self.bad_steps)) >= self.patience:
            raise self._error(self.taken - 1 - (bad - self.patience))

    def check_weights(self) -> None:
        """Raise NonFiniteError if a weight is not finite, which finite gradients can cause, too. Waits for the device."""
        fine = all_finite([p.detach() for _, p in self.named]).to(self.rates)
        if float(self._over_ranks(fine)) < self.world_size:
            raise self._error(self.taken)

    def _error(self, step: int) -> NonFiniteError:
        loss, lr, *norms = self.report.tolist()
        broken = [name for name, norm in zip(self.judged, norms, strict=True) if not norm < math.inf]
        suspects = (  # causes first: a bad parameter makes the loss bad, and a bad loss the gradients
            ("parameter", first_nonfinite(self.named)),
            ("the", None if math.isfinite(loss) else "loss"),
            ("gradient of", broken[0] if broken else None),
        )
        return NonFiniteError(
            step=step,
            lr=lr,
            grad_norm=math.hypot(*norms),
            tensor=next((f"{kind} {name}" for kind, name in suspects if name is not None), "the norm over all gradients"),
            detail=f"loss {loss:.4g}, {len(broken)} of {len(norms)} gradients not finite",
        )
