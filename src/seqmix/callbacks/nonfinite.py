"""Stop a run whose loss or gradients are no longer finite, and say where that began.

Each step asks on the device whether the losses of its micro-batches and its gradients are finite, before the optimizer
uses them. On a CPU the answer is there at once, and the weights stay as they were before the bad step. On an
accelerator, waiting for the answer would cost a synchronisation a step, so it is copied to the host behind the step's
work and read when it has arrived, at most LAG steps later; evaluation and checkpoints wait for it.
"""

from __future__ import annotations

from collections import deque

import lightning as L
import torch
from torch import Tensor

from seqmix.measure import all_finite, first_nonfinite

LAG = 8  # steps whose answer may be under way; a host that far ahead loses nothing by waiting for the oldest


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
            "A lower optimizer.lr or a trainer.gradient_clip_val may help."
        )


class NonFiniteGuard(L.Callback):
    """Raises NonFiniteError when loss or gradients were not finite for `patience` optimizer steps in a row.

    With patience above 1, the bad steps before the last leave weights and optimizer as they are; that needs the answer
    before the step, so on an accelerator it costs a synchronisation a step. Under float16 the gradient scaler meets
    infinite gradients as a matter of course and skips such steps itself: there only the loss is judged.
    No checkpoint is written of weights that are not finite: saving one raises too.
    """

    def __init__(self, patience: int = 1):
        if patience < 1:
            raise ValueError(f"patience must be at least 1 step, got {patience}")
        self.patience = patience
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._bad_steps = 0
        self._losses: list[Tensor] = []  # of the micro-batches of the step under way
        # step, its losses, the answer on the host, the moment it is there
        self._under_way: deque[tuple[int, list[Tensor], Tensor, torch.cuda.Event]] = deque()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_afresh()
        self._waits = pl_module.device.type != "cuda" or self.patience > 1

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer) -> None:
        losses, self._losses = self._losses, []
        judged = list(losses)
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            judged += [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        fine = self._on_all_ranks(trainer, all_finite(judged))
        if self._waits:
            if self._judge(trainer, pl_module, trainer.global_step, losses, bool(fine)):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None  # the optimizer passes over these
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fine, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._under_way.append((trainer.global_step, losses, answer, arrived))
        while self._under_way and (len(self._under_way) > LAG or self._under_way[0][-1].query()):
            self._read_oldest(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._read_all(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        if trainer.state.fn != "fit":
            return
        self._read_all(trainer, pl_module)
        if not bool(self._on_all_ranks(trainer, all_finite([p.detach() for p in pl_module.parameters()]))):
            raise self._error(trainer, pl_module, trainer.global_step, [])

    def _on_all_ranks(self, trainer: L.Trainer, fine: Tensor) -> Tensor:
        """Ranks must stop together: each has its own losses, and under FSDP its own share of gradients and weights."""
        if trainer.world_size == 1:
            return fine
        return trainer.strategy.reduce(fine.to(trainer.strategy.root_device, torch.float32), reduce_op="min") > 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read_all(trainer, pl_module)

    def _read_all(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        while self._under_way:
            self._read_oldest(trainer, pl_module)

    def _read_oldest(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step, losses, answer, arrived = self._under_way.popleft()
        arrived.synchronize()
        self._judge(trainer, pl_module, step, losses, bool(answer))

    def _judge(
        self, trainer: L.Trainer, pl_module: L.LightningModule, step: int, losses: list[Tensor], fine: bool
    ) -> bool:
        """True for a bad step that is still tolerated."""
        self._bad_steps = 0 if fine else self._bad_steps + 1
        if self._bad_steps >= self.patience:
            self._under_way.clear()
            raise self._error(trainer, pl_module, step, losses)
        return not fine

    def _error(
        self, trainer: L.Trainer, pl_module: L.LightningModule, step: int, losses: list[Tensor]
    ) -> NonFiniteError:
        parameters = list(pl_module.named_parameters())
        gradients = [(name, p.grad) for name, p in parameters if p.grad is not None]
        broken = sum(not bool(torch.isfinite(g).all()) for _, g in gradients)
        suspects = (  # a bad parameter makes the loss bad, a bad loss the gradients
            ("parameter", first_nonfinite(parameters)),
            ("the", first_nonfinite(("loss", loss) for loss in losses)),
            ("gradient of", first_nonfinite(gradients)),
        )
        norm = torch.nn.utils.get_total_norm([g.float() for _, g in gradients])
        return NonFiniteError(
            step=step,
            lr=trainer.optimizers[0].param_groups[0]["lr"],
            grad_norm=float(norm),
            tensor=next((f"{kind} {name}" for kind, name in suspects if name is not None), "a gradient since replaced"),
            detail=f"losses {[round(float(x), 4) for x in losses]}, {broken} of {len(gradients)} gradients not finite",
        )
