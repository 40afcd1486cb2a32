"""The predictions of the trained model on a few fixed validation rows, beside their targets."""

from __future__ import annotations

import os
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from seqmix import display

IGNORE = -100  # a target that is not scored


class Predictions(L.Callback):
    """After training, prints the rows, writes them to `<dirpath>/predictions.txt`, and logs them to wandb as a Table.

    rows: how many, from the start of the validation split. max_chars: characters per text on the terminal; the file and the
    table have the whole text. generate_tokens: on a text task (one that knows the bytes of its tokens) the model also
    continues the first half of each row by this many tokens, at `temperature` and from a fixed seed; 0 generates nothing.

    The prediction at a scored position is the largest logit, and is right if it equals the target. Control characters are
    shown as escapes (`\\x1b`), in the file too, and a line feed as ⏎. The table in wandb has the unchanged text.
    """

    COLUMNS = ("row", "input", "target", "prediction", "right", "scored")
    SAMPLE_COLUMNS = ("row", "prompt", "continuation")

    def __init__(
        self,
        dirpath: str | os.PathLike,
        rows: int = 4,
        max_chars: int = 160,
        generate_tokens: int = 200,
        temperature: float = 0.8,
    ):
        for name, value, least in (
            ("rows", rows, 1),
            ("max_chars", max_chars, 8),
            ("generate_tokens", generate_tokens, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        self.path = Path(dirpath).absolute() / "predictions.txt"
        self.rows = rows
        self.max_chars = max_chars
        self.generate_tokens = generate_tokens
        self.temperature = temperature

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:
            return
        task, model = trainer.datamodule, pl_module.model
        rows = torch.arange(min(self.rows, task.eval_rows("val")), device=pl_module.device)  # (B,)
        inputs, targets = task.sample("val", rows)  # (B, L) each
        was_training = model.training
        model.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            predicted = model(inputs).argmax(dim=-1)  # (B, L)
            of_text = task.token_bytes is not None
            continued = self._continue(model, inputs) if of_text and self.generate_tokens > 0 else None
        model.train(was_training)
        if not trainer.is_global_zero:
            return
        table = [
            [
                row,
                task.decode(x),
                task.decode(y[scored]),
                task.decode(p[scored]),
                int((p == y)[scored].sum()),
                len(y[scored]),
            ]
            for row, (x, y, p) in enumerate(zip(inputs.cpu(), targets.cpu(), predicted.cpu(), strict=True))
            for scored in [y != IGNORE]
        ]
        samples = []
        if continued is not None:
            prompt_len = self._prompt_len(inputs)
            samples = [
                [row, task.decode(ids[:prompt_len]), task.decode(ids[prompt_len:])]
                for row, ids in enumerate(continued.cpu())
            ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self._text(table, samples, limit=None), encoding="utf-8")
        say = print if trainer.progress_bar_callback is None else trainer.progress_bar_callback.print
        display.attempt("predictions", lambda: say(self._text(table, samples, limit=self.max_chars)))
        for logger in trainer.loggers:
            if isinstance(logger, L.pytorch.loggers.WandbLogger):
                logger.log_table("predictions", columns=list(self.COLUMNS), data=table)
                if samples:
                    logger.log_table("samples", columns=list(self.SAMPLE_COLUMNS), data=samples)

    def _continue(self, model: torch.nn.Module, inputs: Tensor) -> Tensor:
        generator = torch.Generator(inputs.device).manual_seed(0)
        prompt = inputs[:, : self._prompt_len(inputs)]  # (B, L // 2)
        return model.generate(prompt, self.generate_tokens, temperature=self.temperature, generator=generator)

    def _prompt_len(self, inputs: Tensor) -> int:
        return max(1, inputs.shape[1] // 2)

    def _text(self, table: list[list], samples: list[list], limit: int | None) -> str:
        lines = []
        for row, text, target, prediction, right, scored in table:
            lines += [
                f"validation row {row}: {right} of {scored} right",
                f"  input       {_short(text, limit)}",
                f"  target      {_short(target, limit)}",
                f"  prediction  {_short(prediction, limit)}",
            ]
        for row, prompt, continuation in samples:
            lines += [
                f"continued from validation row {row}",
                f"  prompt        {_short(prompt, limit, end=True)}",
                f"  continuation  {_short(continuation, None if limit is None else 4 * limit)}",
            ]
        return "\n".join(lines) + "\n"


def _short(text: str, limit: int | None, end: bool = False) -> str:
    """On one line, cut to `limit` characters, at its end or its beginning."""
    text = display.visible(text.replace("\n", "⏎"))
    if limit is None or len(text) <= limit:
        return text
    return f"… {text[-limit:]}" if end else f"{text[:limit]} …"
