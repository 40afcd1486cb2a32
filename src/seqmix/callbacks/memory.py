"""Peak memory of training, size of the state, number of parameters: of this run only."""

from __future__ import annotations

import gc

import lightning as L
import torch

from seqmix.measure import parameter_count
from seqmix.memory import MIB, PeakMemory, SavedForBackward
from seqmix.state import state_bytes


class Memory(L.Callback):
    """Peaks over the training steps after the warm-up, without evaluation. They are in the summary, and not logged live.

    `memory/peak_host_mib`, on a CPU, is the memory of this process without libraries and mapped files (memory.HostPeak). It
    includes the text or tokens that the task holds in memory.

    warmup_steps: optimizer steps before the peaks are reset, because compiling, autotuning and first allocations can need more
    than any later step. A run that ends earlier reports the peak of the steps that it ran.

    `memory/predicted_mib` is what a step must hold when its backward begins: weights, the optimizer's state, and what autograd
    saves, counted in the first step (not for compiled or sharded models). The measured peak also contains the gradients of the
    head and the scratch memory of kernels.

    `memory/state_bytes` is the decoding state of one row after a prefill of task.seq_len tokens, in the run's
    precision: constant for a recurrence, grown to that length for a key-value cache.
    """

    def __init__(self, warmup_steps: int = 10):
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
        self.warmup_steps = warmup_steps
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._peak: PeakMemory | None = None
        self._peaks: dict[str, float | None] = dict.fromkeys(("allocated", "reserved", "host"))
        self._counts: dict[str, int | None] = dict.fromkeys(("state_bytes", "params", "params_non_embedding"))
        self._warm = False
        self._saved: SavedForBackward | None = None
        self._predicted: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_afresh()
        total, non_embedding = parameter_count(pl_module.model)
        self._counts |= {"params": total, "params_non_embedding": non_embedding}
        self._first_step = trainer.global_step
        self._peak = PeakMemory(pl_module.device)
        gc.collect()  # an earlier job of this process may have left cycles that hold tensors
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()
        self._peak.reset()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch, batch_idx: int) -> None:
        if trainer.global_step > self._first_step or self._predicted is not None:
            return
        compiled = any(module._compiled_call_impl is not None for module in pl_module.model.modules())
        if not compiled and pl_module.device_mesh is None:
            self._saved = SavedForBackward(pl_module.parameters())
            self._saved.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx: int) -> None:
        if self._saved is not None:
            self._saved.__exit__()
            weights = state_bytes([p.detach() for p in pl_module.parameters()])
            moments = state_bytes([list(of_one.values()) for of_one in trainer.optimizers[0].state.values()])
            self._predicted = (weights + moments + self._saved.bytes) / MIB
            self._saved = None
        if not self._warm and trainer.global_step - self._first_step >= self.warmup_steps > 0:
            self._warm = True
            self._peaks = dict.fromkeys(self._peaks)
            self._peak.reset()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._peak is not None:
            self._take_peaks(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._peak is not None:
            self._peak.reset()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._take_peaks(pl_module)
        self._peak = None  # what follows is not part of training
        tokens = torch.zeros(1, trainer.datamodule.seq_len, dtype=torch.long, device=pl_module.device)  # (1, L)
        model, was_training = pl_module.model, pl_module.model.training
        model.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            _, state = model.prefill(tokens, model.init_state(1))
        model.train(was_training)
        self._counts["state_bytes"] = state_bytes(state)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._saved is not None:
            self._saved.__exit__()
            self._saved = None
        if self._peak is not None:
            self._take_peaks(pl_module)

    def _take_peaks(self, pl_module: L.LightningModule) -> None:
        for name in self._peaks:
            now = getattr(self._peak, name)()
            if now is not None:
                self._peaks[name] = max(now, self._peaks[name] or 0.0)
        captured = pl_module.step.captured_bytes if pl_module.step is not None else 0
        if captured:  # a replay allocates nothing, so the allocator's peak lacks it
            self._peaks["allocated"] = max(captured / MIB, self._peaks["allocated"])

    def summary(self) -> dict[str, float | int | None]:
        """MiB and counts. The accelerator's peaks are None on a CPU, and the host's peak is None on an accelerator."""
        return {
            "memory/peak_allocated_mib": self._peaks["allocated"],
            "memory/peak_reserved_mib": self._peaks["reserved"],
            "memory/peak_host_mib": self._peaks["host"],
            "memory/predicted_mib": self._predicted,
            **{f"memory/{name}": value for name, value in self._counts.items()},
        }
