"""The shape of a draft, its config.json, and the files of its reduced vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.core.errors import UserError, check_whole
from outpace.core.options import CheckedOptions, whole
from outpace.models.files.cache import new_file
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import shipped_model
from outpace.models.files.pairs import shipped_draft
from outpace.models.llama.config.draft_vocab import FILE as VOCAB_FILE
from outpace.models.llama.config.families import FAMILIES, model_type_of
from outpace.models.llama.config.fields import FULL, SLIDING
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict
from outpace.models.llama.weight_sources import parse_layers

LAYERS, SHIPPED = "layers", "shipped"  # values of `init`
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
    if sizes.recurrence:
        raise UserError(f"drafts are not trained from a model whose layers include a {sizes.recurrence.kind}")
    if sizes.score_cap or sizes.full_heads:
        raise UserError("drafts are not trained from Gemma 2 and Gemma 4: name a model of another family")
    if sizes.experts:
        raise UserError("drafts are not trained from a model with mixtures of experts: name a smaller dense model")
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


def save_vocab_ids(file: Path, ids: Tensor) -> None:
    """Write the token ids of a draft's reduced vocabulary, in ascending order, as the int32 tensor `ids`."""
    from safetensors.torch import save_file

    with new_file(file) as part:
        save_file({"ids": ids.cpu().int()}, part, {"format": "pt"})


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
