"""Trains the demonstration model from nothing, by the recipe of the model card.

Owns the two phases, their schedule and the checkpoint folder; tasks and their packing into rows
come from `dataset` and `packing`. Lengths are wall-clock minutes, since the recipe's schedule is a
share of the time.

    python examples/demo_model/train.py --out /tmp/demo-model --log /tmp/demo-model.jsonl

Shapes: B rows per batch (16), S positions per row (512), V vocabulary (2,048), H hidden (256).
Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

if not __package__:  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo_model.dataset import (
    CODE,
    END,
    MODEL_FOLDER,
    SPECIAL_TOKENS,
    TRAINING_LINES,
    RenameSampler,
    SourceFile,
    name_files,
    read_heldout,
    training_files,
)
from examples.demo_model.evaluate import load_tokenizer, teacher_forced
from examples.demo_model.packing import IGNORED, PackedBatches

VOCABULARY_SIZE = 2_048
WARMUP_STEPS = 50
CONSTANT_SHARE = 0.6  # of the phase's time at full learning rate
FINAL_SCALE = 0.02
MAX_GRADIENT_NORM = 1.0
LOSS_CHUNK_TOKENS = 1_024
BAR_CELLS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One of the recipe's two stretches; each starts its optimizers afresh."""

    name: str
    minutes: float  # wall clock, evaluations included
    muon_learning_rate: float
    adamw_learning_rate: float
    answer_only: bool  # loss on the edited text and its end token alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a phase stands after a step."""

    num_steps: int
    num_tokens: int  # trained on in this phase, prompts included
    fraction: float  # of the phase's time, 0 to 1
    loss: float  # mean over the positions with loss, of this step


def new_model() -> Qwen3ForCausalLM:
    """The bundled model's architecture with random float32 weights (3.67 M parameters)."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=2_048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=SPECIAL_TOKENS.index(CODE),
            eos_token_id=SPECIAL_TOKENS.index(END),
            pad_token_id=SPECIAL_TOKENS.index(END),
        )
    )


def train_tokenizer(files: Iterable[SourceFile]) -> Tokenizer:
    """A byte-level BPE of 2,048 entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n".join(file.lines) for file in files), trainer)
    return tokenizer


def packed_loss(
    model: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy over the targets that are not IGNORED; inputs, targets [B, S] int64.

    Logits are made for those positions only and a chunk at a time: 4 MiB of float32 stay in the
    cache, where the 64 MiB of a whole batch take more than twice the time.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, S, H]
        kept = targets != IGNORED
        chunks = zip(
            hidden[kept].split(LOSS_CHUNK_TOKENS),
            targets[kept].split(LOSS_CHUNK_TOKENS),
            strict=True,
        )
        total = torch.zeros(())
        for chunk_hidden, chunk_targets in chunks:
            logits = model.lm_head(chunk_hidden).float()  # [chunk, V]
            total = total + functional.cross_entropy(logits, chunk_targets, reduction="sum")
    return total / kept.sum()


def learning_rate_scale(num_steps: int, fraction: float) -> float:
    """Factor on the learning rates after `num_steps` steps and a share of the phase's time."""
    warmup = min(1.0, (num_steps + 1) / WARMUP_STEPS)
    decay = max(0.0, fraction - CONSTANT_SHARE) / (1 - CONSTANT_SHARE)
    return warmup * (1 - min(decay, 1.0) * (1 - FINAL_SCALE))


def train_phase(
    model: Qwen3ForCausalLM,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    phase: Phase,
    after_step: Callable[[Progress], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Steps until the phase's minutes are over; always at least one.

    Args:
        after_step: called after each step; its time counts as the phase's.
        clock: seconds from any origin.
    """
    # Muon orthogonalises updates of matrices between hidden layers; embeddings and gains are not.
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (
            torch.optim.Muon(matrices, lr=phase.muon_learning_rate, weight_decay=0.0),
            phase.muon_learning_rate,
        ),
        (
            torch.optim.AdamW(
                rest, lr=phase.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            ),
            phase.adamw_learning_rate,
        ),
    ]
    started = clock()
    fraction = 0.0
    num_tokens = 0
    for num_steps, (inputs, targets) in enumerate(batches):
        loss = packed_loss(model, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        scale = learning_rate_scale(num_steps, fraction)
        for optimizer, learning_rate in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()
        num_tokens += inputs.numel()
        fraction = (clock() - started) / (phase.minutes * 60)
        after_step(
            Progress(
                num_steps=num_steps + 1,
                num_tokens=num_tokens,
                fraction=min(fraction, 1.0),
                loss=loss.item(),
            )
        )
        if fraction >= 1:
            return


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A folder that transformers loads: bfloat16 safetensors, configuration and tokenizer."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_FOLDER / name, folder)


def show_bar(phase: Phase, progress: Progress) -> None:
    """How far the phase is, in a line on stderr that the next one replaces; in a terminal only."""
    if sys.stderr.isatty():
        filled = "#" * int(BAR_CELLS * progress.fraction)
        text = f"{phase.name} {filled:.<{BAR_CELLS}} {progress.fraction:4.0%}"
        end = "\n" if progress.fraction >= 1 else ""
        sys.stderr.write(f"\r\x1b[K{text}, loss {progress.loss:.3f}{end}")
        sys.stderr.flush()


class CurveLog:
    """Follows the phases: a line of figures and a checkpoint every few minutes.

    A line's keys: phase, minutes (wall clock of the run), tokens (of both phases), loss (mean since
    the line before), heldout_accuracy (teacher-forced, on `rows`).
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        *,
        rows: list[dict[str, str]],
        log_file: Path | None,
        checkpoint_folder: Path,
        interval_minutes: float,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._rows = rows
        self._log_file = log_file
        self._checkpoint_folder = checkpoint_folder
        self._interval_s = interval_minutes * 60
        self._started = time.monotonic()
        self._last_line = self._started
        self._losses: list[float] = []
        self._earlier_tokens = 0

    def after_step(self, phase: Phase, progress: Progress) -> None:
        """Writes a line when one is due, and at the end of the phase; a terminal has a bar, too."""
        self._losses.append(progress.loss)
        show_bar(phase, progress)
        over = progress.fraction >= 1
        if not over and time.monotonic() - self._last_line < self._interval_s:
            return
        # Held-out rows differ in length: compiled code would be made anew for each of them.
        with torch.compiler.set_stance("force_eager"):
            accuracy = teacher_forced(self._model, self._tokenizer, self._rows).token_accuracy
        line = json.dumps(
            {
                "phase": phase.name,
                "minutes": round((time.monotonic() - self._started) / 60, 2),
                "tokens": self._earlier_tokens + progress.num_tokens,
                "loss": round(sum(self._losses) / len(self._losses), 4),
                "heldout_accuracy": round(accuracy, 4),
            }
        )
        print(line, flush=True)
        if self._log_file is not None:
            with self._log_file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        save_checkpoint(
            self._model, self._tokenizer, self._checkpoint_folder / f"checkpoint-{phase.name}"
        )
        self._losses.clear()
        self._last_line = time.monotonic()
        if over:
            self._earlier_tokens += progress.num_tokens


def main() -> None:
    arguments = _parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.log is not None:
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    files = training_files()
    tokenizer = train_tokenizer(files) if arguments.new_tokenizer else load_tokenizer(MODEL_FOLDER)
    model = _load_model(arguments.init) if arguments.init else new_model()
    named = name_files(files)
    if arguments.compile:
        model.model.compile()
    log = CurveLog(
        model,
        tokenizer,
        rows=read_heldout(limit=arguments.evaluate_tasks),
        log_file=arguments.log,
        checkpoint_folder=arguments.out,
        interval_minutes=arguments.evaluate_minutes,
    )
    phases = (
        Phase(
            name="all-tokens",
            minutes=arguments.phase1_minutes,
            muon_learning_rate=0.02,
            adamw_learning_rate=3e-3,
            answer_only=False,
        ),
        Phase(
            name="edited-text",
            minutes=arguments.phase2_minutes,
            muon_learning_rate=0.01,
            adamw_learning_rate=2e-3,
            answer_only=True,
        ),
    )
    for index, phase in enumerate(phases):
        if phase.minutes > 0:
            sampler = RenameSampler(
                named, line_bounds=TRAINING_LINES, seed=arguments.seed * len(phases) + index
            )
            batches = PackedBatches(sampler, tokenizer, answer_only=phase.answer_only)
            train_phase(model, batches, phase, functools.partial(log.after_step, phase))
    save_checkpoint(model, tokenizer, arguments.out)


def _load_model(folder: Path) -> Qwen3ForCausalLM:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not isinstance(model, Qwen3ForCausalLM):
        raise ValueError(f"{folder} holds a {type(model).__name__}, not a Qwen3ForCausalLM")
    return model


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demonstration model.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--phase1-minutes", type=float, default=45, help="0 leaves the phase out")
    parser.add_argument("--phase2-minutes", type=float, default=68, help="0 leaves the phase out")
    parser.add_argument("--init", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--new-tokenizer", action="store_true", help="train one; default: bundled")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile: a few per cent faster at most; needs a C++ compiler",
    )
    parser.add_argument("--log", type=Path, help="JSON lines of the curve are appended here")
    parser.add_argument("--evaluate-minutes", type=float, default=3, help="between log lines")
    parser.add_argument("--evaluate-tasks", type=int, default=100, help="held-out tasks per line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
