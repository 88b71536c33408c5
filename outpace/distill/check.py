"""What can be told wrong about a run before its first second of work, whatever stage it would stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from outpace.core.errors import UserError
from outpace.distill import prompts, training_state
from outpace.distill.export import settled_ids
from outpace.distill.options import DRAFT, TRAINING, DistillOptions
from outpace.distill.parts import shared_out
from outpace.distill.start import draft_config, frozen_names, target_config
from outpace.distill.text import longest_prompt
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import open_folder
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.runtimes import missing_kernels
from outpace.models.text.tokenizer import Tokenizer


def check(options: DistillOptions, target: Path | None) -> None:
    """UserError for what the stages that are asked for would run into. `target` is its folder, None: nothing is
    written or trained. Makes the run's folder."""
    texts = prompts.collect(options.prompts) if options.writes else []
    if target is not None:
        with open_folder(target) as checkpoint:
            sizes = target_config(checkpoint)
            if options.writes:
                longest_prompt(options.writer, sizes.max_positions)
            if options.trains:
                _check_draft(options, checkpoint, sizes)
        if options.writes:
            _check_lengths(options, texts, Tokenizer.from_folder(target), sizes.max_positions)
    if options.judges:
        _check_judging(options)
    _make(options.out)


def _check_draft(options: DistillOptions, checkpoint: Checkpoint, sizes: LlamaConfig) -> None:
    """The draft's shape, and whether the folder has the beginnings of another one."""
    shape, folder = options.shape, options.out / TRAINING
    if shape.vocab > sizes.vocab_size:
        raise UserError(f"vocab is {shape.vocab}, the target has {sizes.vocab_size} tokens")
    ids = settled_ids(folder, shape.vocab)
    config = from_dict(draft_config(checkpoint.config, shape, None if ids is None else ids.tolist()))
    shapes = tensor_shapes(config)
    frozen = frozen_names(config, sizes)
    trained = {name: shape for name, shape in shapes.items() if name not in frozen}
    if shape.draft is not None:
        with Checkpoint.open(shape.draft) as draft:
            draft.check_shapes(trained)
    training_state.check(folder, trained)
    for held in (training_state.sizes(trained), {name: 2 * math.prod(shape) for name, shape in shapes.items()}):
        shared_out(held, options.train.part_bytes)  # a part that is too small for a tensor is an error


def _check_lengths(options: DistillOptions, texts: Sequence[str], tokenizer: Tokenizer, context: int) -> None:
    """A run that goes on to train and to judge needs answers that fit, and prompts that can be asked."""
    encode = tokenizer.encode_prompt
    if options.trains and not any(len(encode(text)) < options.train.length for text in texts):
        raise UserError(f"length is {options.train.length}, no prompt and first token of an answer fit into so few")
    for task, asked in prompts.to_judge(options.tasks, options.prompts).items() if options.judges else ():
        for text in asked[: options.judge.prompts]:
            count = len(encode(text))
            if count >= context:
                raise UserError(
                    f"the task {task} has a prompt of {count} tokens, the target's context holds {context}:"
                    f" {text[:40]!r}..."
                )


def _check_judging(options: DistillOptions) -> None:
    prompts.to_judge(options.tasks, options.prompts)
    if options.runtime == "native" and (reason := missing_kernels()) is not None:
        raise UserError(reason)
    if not options.trains and options.evaluate is None and not (options.out / DRAFT).is_dir():
        raise UserError(f"{options.out} holds no draft yet: run `outpace distill --stage train` first")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror})") from error
