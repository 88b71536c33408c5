"""The kind standalone: a small model of the target's architecture, from some of its layers or an earlier draft."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError, check_whole
from outpace.core.options import CheckedOptions, whole
from outpace.distill.student import FROZEN, Student
from outpace.models.files.cache import new_file, replaced_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.find import open_folder, shipped_model
from outpace.models.files.pairs import shipped_draft
from outpace.models.files.reading import write_json
from outpace.models.llama.config.draft_vocab import FILE as VOCAB_FILE
from outpace.models.llama.config.families import FAMILIES, model_type_of
from outpace.models.llama.config.fields import FULL, SLIDING
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.weight_sources import parse_layers, source_of

LAYERS, SHIPPED = "layers", "shipped"  # values of `init`
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json"),
)
WINDOW = 128  # trailing tokens that a draft reads: more do not help a few layers, see docs/log.md


@dataclass(frozen=True)
class DraftShape(CheckedOptions):
    """The shape and initial weights of a draft, which has the target's width.

    `layers` is a count, or a list of the target's layers as in "0,14,29" or "0-24,26-29". With `draft`, training
    continues from that draft's weights.
    """

    layers: str = "3"
    vocab: int = whole(0, 0)  # size of the draft's vocabulary; 0: all tokens
    draft: Path | None = None  # the folder of a draft for the same target, packed or whole

    @classmethod
    def of_draft(cls, folder: Path) -> DraftShape:
        """Return the shape of the draft in `folder`, to continue its training; UserError if there is none."""
        if not (folder / "config.json").is_file():
            raise UserError(f"init is {str(folder)!r}, it must be {LAYERS}, {SHIPPED} or the folder of a draft")
        with Checkpoint.open(folder) as checkpoint:
            sizes, ours = from_dict(checkpoint.config), checkpoint.config.get("outpace") or {}
        layers = ours.get("target_layers")
        named = ",".join(map(str, layers)) if layers and len(layers) > 1 else str(sizes.num_layers)
        vocab = 0
        if (file := folder / VOCAB_FILE).is_file():
            ids = read_vocab_ids(file)
            if ids[-1] >= sizes.vocab_size:
                raise UserError(f"{file} names token {int(ids[-1])}, the draft has {sizes.vocab_size} tokens")
            vocab = len(ids)
        return cls(named, vocab, folder)


def shape_from_options(layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
    """Return the shape for these options; `init` may also be a draft's folder, or `shipped`.

    `shipped` is the draft that comes with outpace for the target of this name. UserError if a shape is given together
    with a draft, which has its own.
    """
    if init == LAYERS:
        return DraftShape(layers, vocab)
    shape = DraftShape.of_draft(Path(resolve_draft("init", init, target)))
    if DraftShape(layers, vocab) != DraftShape():
        raise UserError(f"the draft {init} has a shape of its own: leave out --layers and --vocab")
    return shape


def resolve_draft(option: str, draft: str, target: str | None) -> str:
    """Return the draft, with `shipped` replaced by the one that comes with outpace for this target.

    UserError, which names the option, if there is none.
    """
    if draft != SHIPPED:
        return draft
    found = shipped_draft(shipped_model().stem if target is None else target)
    if found is None:
        raise UserError(f"no draft comes with outpace for {target}, so {option} cannot be {SHIPPED}")
    return found


def target_config(checkpoint: Checkpoint) -> LlamaConfig:
    """Return the configuration of a Llama-family model after checking its tensors' shapes; UserError for any other."""
    return checkpoint.read_config()


def pick_layers(shape: DraftShape, total: int) -> list[int]:
    """Return the target's layers to start from: the named ones, or a count spread evenly from the first to the last."""
    if not shape.layers.isdecimal():
        return parse_layers(shape.layers, total)
    count = int(shape.layers)
    check_whole("layers", count, 1, total)
    return [round(place * (total - 1) / max(count - 1, 1)) for place in range(count)]


def draft_config(config: dict[str, Any], shape: DraftShape) -> dict[str, Any]:
    """Return the draft's config.json, derived from the target's; the draft is not quantised."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    sizes = from_dict(config)
    layers = pick_layers(shape, sizes.num_layers)
    made = {**config, "num_hidden_layers": len(layers), "head_dim": sizes.head_dim, "dtype": "bfloat16"}
    made["torch_dtype"] = made["dtype"]  # the name that older versions of transformers read
    made |= _layer_fields(config, sizes, layers)
    made["outpace"] = {"target_layers": layers, "draft_window": WINDOW}
    if shape.vocab:
        made["outpace"]["draft_vocab_size"] = shape.vocab
    return made


def _layer_fields(config: Mapping[str, Any], sizes: LlamaConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of config.json that describe each layer, for these layers."""
    chosen, fields = sizes.of_layers(layers), dict[str, Any]()
    types = config.get("layer_types")
    if types is not None:
        fields["layer_types"] = [types[layer] for layer in layers]
    elif FAMILIES[model_type_of(config)].by_layer:
        slides = chosen.local_layers or [window is not None for window in chosen.windows]
        fields |= {"layer_types": [SLIDING if slid else FULL for slid in slides]} if slides else {}
    if config.get("no_rope_layers") or sizes.rotary_layers:
        fields["no_rope_layers"] = [int(chosen.rotates(layer)) for layer in range(len(layers))]
    return fields


def new_student(
    target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
) -> Student:
    """Return the untrained draft, whose embeddings and output layer are the target's."""
    with open_folder(target) as checkpoint:
        sizes = target_config(checkpoint)
        config = from_dict(draft_config(checkpoint.config, shape))
        layers = pick_layers(shape, sizes.num_layers)
        tensors = {name: checkpoint.tensor(source_of(name, layers)).float() for name in tensor_shapes(config)}
    if shape.draft is not None:
        trained = _trained_shapes(config)
        with Checkpoint.open(shape.draft) as draft:
            draft.check_shapes(trained)
            tensors |= {name: draft.tensor(name).float() for name in trained}
    tensors = {name: value.to(device) for name, value in tensors.items()}
    return Student(config, tensors, None if ids is None else ids.to(device))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose hidden states the draft reads: none."""
    return ()


def vocab_ids(folder: Path) -> Tensor | None:
    """Return the reduced vocabulary of the draft in `folder`."""
    return read_vocab_ids(folder / VOCAB_FILE)


def trained_shapes(target: Checkpoint, shape: DraftShape, taps: Sequence[int] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained tensors; UserError for an earlier draft that has others."""
    shapes = _trained_shapes(from_dict(draft_config(target.config, shape)))
    if shape.draft is not None:
        with Checkpoint.open(shape.draft) as draft:
            draft.check_shapes(shapes)
    return shapes


def write(folder: Path, student: Student, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
    """Replace the draft in `folder`."""
    with open_folder(target) as source:
        config = draft_config(source.config, shape)
    write_draft(folder, student, config, target)


def _trained_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a draft's trained tensors."""
    return {name: shape for name, shape in tensor_shapes(config).items() if name not in FROZEN}


def write_draft(folder: Path, student: Student, config: Mapping[str, Any], target: Path) -> None:
    """Replace the draft in `folder`; `config` is its config.json. The old draft is kept if that fails.

    Weights are stored in bfloat16 under their Hugging Face names. A draft with a reduced vocabulary has its token ids
    in the int32 tensor `ids` of draft_vocab.safetensors.
    """
    from safetensors.torch import save_file

    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in student.tensors.items()}
    with replaced_folder(folder) as unfinished:
        write_json(unfinished / "config.json", config)
        save_file(tensors, unfinished / SINGLE, {"format": "pt"})
        if student.ids is not None:
            save_vocab_ids(unfinished / VOCAB_FILE, student.ids)
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, unfinished / name)


def save_vocab_ids(file: Path, ids: Tensor) -> None:
    """Write the token ids of a draft's reduced vocabulary, in ascending order, as the int32 tensor `ids`."""
    from safetensors.torch import save_file

    with new_file(file) as part:
        save_file({"ids": ids.cpu().to(torch.int32)}, part, {"format": "pt"})


def read_vocab_ids(file: Path) -> Tensor:
    """Read the token ids of a reduced vocabulary, int64 [ids]; UserError if the file is damaged."""
    from safetensors.torch import load_file

    try:
        ids = load_file(file)["ids"].long()
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} cannot be read ({error})") from error
    if ids.dim() != 1 or not len(ids) or bool((ids.diff() <= 0).any()):
        raise UserError(f"{file} must hold token ids in rising order")
    return ids


def chosen_vocab_ids(folder: Path, size: int) -> Tensor | None:
    """Return the vocabulary that a training in `folder` chose; None before it began, or if `size` is 0.

    UserError if it has another size.
    """
    if not size or not (folder / VOCAB_FILE).exists():
        return None
    ids = read_vocab_ids(folder / VOCAB_FILE)
    if len(ids) != size:
        raise UserError(f"{folder} holds a draft of {len(ids)} tokens, not {size}; choose another folder or --vocab")
    return ids
