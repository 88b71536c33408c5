"""Initialises a draft: with layers of its target, a projection of them, fresh weights, or an earlier draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError, check_whole, unknown
from outpace.distill.export import VOCAB_FILE, read_vocab_ids
from outpace.distill.student import EMBEDDING, HEAD, NORM, Student
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import open_folder, shipped_model
from outpace.models.files.pairs import shipped_draft
from outpace.models.llama.config.families import BY_LAYER
from outpace.models.llama.config.fields import FULL, SLIDING
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.config.rope import LongScaling

INITS = ("layers", "fresh")
SHIPPED = "shipped"
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
WINDOW = 128  # trailing tokens that a draft reads: more do not help a few layers, see docs/log.md


@dataclass(frozen=True)
class DraftShape:
    """The shape and initial weights of a draft.

    `layers` is a count, or a list of the target's layers as in "0,14,29"; `hidden` None means the target's width. With
    `draft`, training continues from that draft's weights, and `init` is how these were once initialised.
    """

    layers: str = "3"
    hidden: int | None = None
    init: str = "layers"
    vocab: int = 0  # size of the draft's vocabulary; 0: all tokens
    draft: Path | None = None  # the folder of a draft for the same target, packed or whole

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise unknown("init", self.init, INITS)
        check_whole("vocab", self.vocab, 0)
        if self.hidden is not None:
            check_whole("hidden", self.hidden, 8)

    @classmethod
    def of_draft(cls, folder: Path) -> DraftShape:
        """Return the shape of the draft in `folder`, to continue its training; UserError if there is none."""
        if not (folder / "config.json").is_file():
            raise UserError(
                f"init is {str(folder)!r}, it must be {', '.join(INITS)}, {SHIPPED} or the folder of a draft"
            )
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
        return cls(named, sizes.hidden_size, "layers" if layers else "fresh", vocab, folder)


def shape_from_options(layers: str, hidden: int | None, init: str, vocab: int, target: str | None) -> DraftShape:
    """Return the shape for these options; `init` may also be a draft's folder, or `shipped`.

    `shipped` is the draft that comes with outpace for the target of this name. UserError if a shape is given together
    with a draft, which has its own.
    """
    if init in INITS:
        return DraftShape(layers, hidden, init, vocab)
    shape = DraftShape.of_draft(Path(resolve_draft("init", init, target)))
    if DraftShape(layers, hidden, vocab=vocab) != DraftShape():
        raise UserError(f"the draft {init} has a shape of its own: leave out --layers, --hidden and --vocab")
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
    config = from_dict(checkpoint.config)
    checkpoint.check_shapes(tensor_shapes(config))
    return config


def pick_layers(shape: DraftShape, total: int) -> list[int]:
    """Return the target's layers to start from: the named ones, or a count spread evenly from the first to the last."""
    try:
        numbers = [int(part) for part in shape.layers.split(",")]
    except ValueError:
        raise UserError(f"layers is {shape.layers!r}, it must be a count, or numbers as in 0,{total - 1}") from None
    if "," not in shape.layers:
        count = numbers[0]
        check_whole("layers", count, 1, total)
        return [round(place * (total - 1) / max(count - 1, 1)) for place in range(count)]
    if numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < total:
        raise UserError(f"layers is {shape.layers!r}, it must name layers from 0 to {total - 1} in rising order")
    return numbers


def draft_config(config: dict[str, Any], shape: DraftShape) -> dict[str, Any]:
    """Return the draft's config.json, derived from the target's; the draft is not quantised."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    sizes = from_dict(config)
    layers = pick_layers(shape, sizes.num_layers)
    made = {**config, "num_hidden_layers": len(layers), "head_dim": sizes.head_dim, "dtype": "bfloat16"}
    made["torch_dtype"] = made["dtype"]  # the name that older versions of transformers read
    made |= _layer_fields(config, sizes, layers)
    made["outpace"] = {"target_layers": layers if shape.init == "layers" else None, "draft_window": WINDOW}
    if shape.vocab:
        made["outpace"]["draft_vocab_size"] = shape.vocab
    if shape.hidden is not None:
        if shape.hidden > sizes.hidden_size:
            raise UserError(f"hidden is {shape.hidden}, it must be at most the target's {sizes.hidden_size}")
        if isinstance(sizes.rope_scaling, LongScaling) and shape.hidden != sizes.hidden_size:
            own = f"the target's own {sizes.hidden_size}"
            raise UserError(f"hidden is {shape.hidden}, drafts for a target with LongRoPE have {own}: leave it out")
        made["hidden_size"] = shape.hidden
    return made


def _layer_fields(config: Mapping[str, Any], sizes: LlamaConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of config.json that describe each layer, for these layers."""
    chosen, fields = sizes.of_layers(layers), dict[str, Any]()
    types = config.get("layer_types")
    if types is not None:
        fields["layer_types"] = [types[layer] for layer in layers]
    elif config.get("model_type") in BY_LAYER:
        slides = chosen.local_layers or [window is not None for window in chosen.windows]
        fields |= {"layer_types": [SLIDING if slid else FULL for slid in slides]} if slides else {}
    if config.get("no_rope_layers") or sizes.rotary_layers:
        fields["no_rope_layers"] = [int(chosen.rotates(layer)) for layer in range(len(layers))]
    return fields


def new_student(target: Path, shape: DraftShape, ids: Tensor | None, seed: int, device: str = "cpu") -> Student:
    """Return the untrained draft; with the target's width, its embeddings and output layer are the target's, frozen."""
    with open_folder(target) as checkpoint:
        sizes = target_config(checkpoint)
        config = from_dict(draft_config(checkpoint.config, shape))
        layers = pick_layers(shape, sizes.num_layers)
        tensors = {name: checkpoint.tensor(_target_name(name, layers)).float() for name in tensor_shapes(config)}
    if config.hidden_size != sizes.hidden_size:
        tensors = _project(tensors, config, sizes)
    trained = trained_shapes(config, sizes)
    if shape.draft is not None:
        with Checkpoint.open(shape.draft) as draft:
            draft.check_shapes(trained)
            tensors |= {name: draft.tensor(name).float() for name in trained}
    elif shape.init == "fresh":
        tensors |= _fresh_weights(config, tensors, seed)
    tensors = {name: value.to(device) for name, value in tensors.items()}
    return Student(config, tensors, trained.keys(), None if ids is None else ids.to(device))


def trained_shapes(config: LlamaConfig, target: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the trained tensors' shapes: without embeddings and output layer if the draft has the target's width."""
    frozen = (EMBEDDING, HEAD) if config.hidden_size == target.hidden_size else ()
    return {name: shape for name, shape in tensor_shapes(config).items() if name not in frozen}


def _target_name(name: str, layers: Sequence[int]) -> str:
    """Return the target's name of a tensor of the draft."""
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)


def _project(tensors: dict[str, Tensor], config: LlamaConfig, target: LlamaConfig) -> dict[str, Tensor]:
    """Project the target's tensors onto the principal directions of its embeddings, one per dimension of the draft.

    In models that scale embeddings by the root of their width, the scale is compensated.
    """
    embedding = tensors[EMBEDDING]
    _, vectors = torch.linalg.eigh(embedding.T @ embedding)  # ascending eigenvalues
    basis = vectors[:, -config.hidden_size :]  # [hidden, width]
    made = dict(tensors)
    for name, value in tensors.items():
        if value.dim() == 1 and "norm" in name and not name.endswith(HEAD_NORMS):
            made[name] = (basis**2).T @ value  # mean gain of each direction
        elif name.rpartition(".")[0].endswith(("o_proj", "down_proj")):
            made[name] = basis.T @ value
        elif value.dim() == 2 and value.shape[1] == len(basis):
            made[name] = value @ basis
    ratio = target.embedding_scale / config.embedding_scale
    made[EMBEDDING] = made[EMBEDDING] * ratio
    if config.tie_embeddings:
        made[NORM] = (made[NORM] + config.norm_offset) / ratio - config.norm_offset
    return made


def _fresh_weights(config: LlamaConfig, tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return random weights for everything but embeddings, final norm and output layer."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, value in tensors.items():
        if name in (EMBEDDING, HEAD, NORM):
            continue
        if value.dim() == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            spread = 0.02 / (2 * config.num_layers) ** 0.5 if is_output else 0.02
            made[name] = torch.randn(value.shape, generator=generator) * spread
        else:
            made[name] = torch.full_like(value, 0.0 if name.endswith("bias") else 1.0 - config.norm_offset)
    return made
