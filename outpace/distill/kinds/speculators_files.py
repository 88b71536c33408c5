"""Code shared by the kinds of heads: initial weights, and files in the format of speculators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.kinds.standalone import DraftShape, target_config
from outpace.distill.student import EMBEDDING, HEAD, Student
from outpace.distill.taps import tap_list
from outpace.models.files.cache import replaced_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.find import open_folder
from outpace.models.files.reading import write_json
from outpace.models.heads.config import HeadConfig, fields_of
from outpace.models.heads.files import HeadFiles, kind_of_head, open_head
from outpace.models.heads.reader import IGNORED_IN_LAYER, draft_ids, read_head
from outpace.models.llama.config.llama_config import LlamaConfig

COPIED = (  # fields of the target's config.json that describe the layers
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "max_position_embeddings",
    "vocab_size",
)
DIGESTS = ("tokenizer", "template", "weights", "runtime")


class HeadStudent(Student):
    """A head in training. Its embedding and output layer, usually the target's, are not trained."""

    def __init__(
        self,
        head: HeadConfig,
        layer: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        output: Tensor,
        ids: Tensor | None,
        device: str,
    ) -> None:
        """`layer`: the head's transformer_layer_config. `tensors`: those to train, and EMBEDDING. `output` [ids,
        hidden]: the rows of the output layer for the tokens `ids`; None: all tokens."""
        moved = {name: value.to(device) for name, value in tensors.items()}
        super().__init__(replace(head.layers, tie_embeddings=True), moved, None)
        self.head, self.layer, self.taps = head, layer, head.taps
        self.ids, self._head = None if ids is None else ids.to(device), output.to(device)


class HeadStart(NamedTuple):
    """The arguments of a `HeadStudent` when training begins. `files`: the head to continue; None: a new head."""

    head: HeadConfig
    layer: Mapping[str, Any]
    tensors: dict[str, Tensor]
    output: Tensor
    files: HeadFiles | None


Description = tuple[HeadConfig, Mapping[str, Any], HeadFiles | None]
"""A head's configuration, its transformer_layer_config, and the files to start from (None: a new head)."""

ShapesOf = Callable[[HeadConfig, HeadFiles | None], dict[str, tuple[int, ...]]]
"""Returns the shapes of a head's trained tensors, by name."""


def shapes_function(
    describe: Callable[[Checkpoint, DraftShape, Sequence[int]], Description], shapes_of: ShapesOf
) -> Callable[[Checkpoint, DraftShape, Sequence[int]], dict[str, tuple[int, ...]]]:
    """Return the function `trained_shapes` for a kind of head, see `TrainedKind`."""

    def trained_shapes(target: Checkpoint, shape: DraftShape, taps: Sequence[int]) -> dict[str, tuple[int, ...]]:
        head, _, files = describe(target, shape, taps)
        return shapes_of(head, files)

    return trained_shapes


def start_head(
    target: Path,
    ids: Tensor | None,
    describe: Callable[[Checkpoint], Description],
    shapes_of: ShapesOf,
    initial: Callable[[Checkpoint, LlamaConfig, str, tuple[int, ...]], Tensor],
) -> HeadStart:
    """Return the start of a head's training, new or continued.

    The functions are those of a kind: `describe` and `shapes_of` return the head and the shapes of its trained tensors;
    `initial` makes a new head's tensor from the target, its sizes, and the tensor's name and shape.
    """
    with open_folder(target) as checkpoint:
        head, layer, files = describe(checkpoint)
        shapes, sizes = shapes_of(head, files), target_config(checkpoint)
        embedding, output = target_ends(checkpoint, sizes, ids)
        if files is None:
            tensors = {name: initial(checkpoint, sizes, name, shape) for name, shape in shapes.items()}
    if files is not None:
        tensors = {name: stored(files, name.removeprefix("model.")) for name in shapes}
        embedding, output = stored_ends(files, head, embedding, output)
    return HeadStart(head, layer, tensors | {EMBEDDING: embedding}, output, files)


def default_head_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose hidden states heads read by default."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def head_shape(kind: str, kind_name: str, layers: str, init: str, vocab: int) -> DraftShape:
    """Return the shape of the head in the folder `init`; UserError for another kind of head, or for a `vocab`, because
    the head has its own. `layers` is returned as it is."""
    path = Path(init)
    if not path.is_dir() or kind_of_head(path) != kind:
        article = "an" if kind[0] in "AEIOU" else "a"
        raise UserError(
            f"init is {init!r}, for the kind {kind_name} it must be layers or the folder of {article} {kind} head"
        )
    if vocab:
        raise UserError(f"the head {init} has a vocabulary of its own: leave out --vocab")
    files = open_head(path)
    return DraftShape(layers, prod(files.shape("d2t")) if "d2t" in files else 0, path)


def head_vocab_ids(folder: Path) -> Tensor | None:
    """Return the reduced vocabulary of the head in `folder`, in ascending order."""
    files = open_head(folder)
    stored = np.arange(files.shape("d2t")[0]) + files.array("d2t") if "d2t" in files else None
    return None if stored is None else torch.from_numpy(np.sort(stored))


def read_own_head(
    target: Checkpoint, draft: Path, taps: Sequence[int]
) -> tuple[HeadConfig, Mapping[str, Any], HeadFiles]:
    """Return the configuration of a head to continue training, its transformer_layer_config, and its files; UserError
    for a head that does not fit the target or the taps."""
    sizes, files = target_config(target), open_head(draft)
    head = read_head(files, target.config, sizes.max_positions, sizes.num_layers)
    draft_ids(files, head)  # UserError for tokens that the target does not have
    layer = fields_of(files.config, "transformer_layer_config") or files.config
    if head.taps != tuple(taps):
        own = tap_list(head.taps)
        raise UserError(f"the head {draft} reads the layers {own}, not {tap_list(taps)}: name --taps {own}")
    left_out = {*IGNORED_IN_LAYER, "dflash_config"}  # z-lab's files have it next to the fields of the layers
    return head, {name: value for name, value in layer.items() if name not in left_out}, files


def layer_fields(target: Mapping[str, Any], sizes: LlamaConfig, model_type: str, num_layers: int) -> dict[str, Any]:
    """Return the transformer_layer_config of a new head, of layers as wide as the target's."""
    layer = {name: target[name] for name in COPIED if target.get(name) is not None}
    if "rope_type" in (target.get("rope_parameters") or {}):  # one for all layers
        layer["rope_parameters"] = target["rope_parameters"]
    layer |= {"model_type": model_type, "num_hidden_layers": num_layers, "head_dim": sizes.head_dim}
    return layer | {"hidden_act": "silu", "rope_theta": sizes.rope_theta, "tie_word_embeddings": False}


def target_ends(target: Checkpoint, sizes: LlamaConfig, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the target's embedding, and the rows of its output layer for the tokens `ids` (None: all)."""
    embedding = target.tensor(EMBEDDING).float()
    output = embedding if sizes.tie_embeddings else target.tensor(HEAD).float()
    return embedding, output if ids is None else output[ids]


def stored_ends(files: HeadFiles, head: HeadConfig, embedding: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head's own embedding and output layer where its files hold them, else the given ones."""
    order = draft_ids(files, head)
    if HEAD in files:
        output = stored(files, HEAD)[() if order is None else np.argsort(order)]
    return stored(files, "embed_tokens.weight") if "embed_tokens.weight" in files else embedding, output


def stored(files: HeadFiles, name: str) -> Tensor:
    """Read a tensor as float32."""
    return torch.from_numpy(np.array(files.array(name), np.float32))


def start_of(target: Checkpoint, sizes: LlamaConfig, source: str, shape: Sequence[int]) -> Tensor:
    """Return the initial value of a layer's tensor: the target's tensor `source` (Llama's name) if its shape fits; else
    random for a matrix, 1 for a norm and 0 for a bias.

    If `shape` has twice the columns, the first half, which multiplies embeddings, is zero.
    """
    source = source.replace("post_attention_layernorm", sizes.mlp_norm)
    found = target.tensor(source).float() if source in target.names() else None
    if found is not None and len(shape) == 1 and "norm" in source:
        found = found + sizes.norm_offset
    if found is not None and len(shape) == 2 and found.shape[1] * 2 == shape[1]:
        found = torch.cat([torch.zeros_like(found), found], 1)
    if found is not None and found.shape == tuple(shape):
        return found
    if len(shape) == 1:
        return torch.ones(*shape) if "norm" in source else torch.zeros(*shape)
    return random_matrix(shape)


def random_matrix(shape: Sequence[int]) -> Tensor:
    """Return random weights that keep the variance of their input; the same for equal shapes."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * shape[-1] ** -0.5


def last_tap(shape: Sequence[int]) -> Tensor:
    """Return a matrix [hidden, taps * hidden] that passes the last hidden state on."""
    return torch.eye(shape[0]).repeat(1, shape[1] // shape[0]) * (torch.arange(shape[1]) >= shape[1] - shape[0])


def write_head(
    folder: Path,
    student: HeadStudent,
    target: Path,
    shape: DraftShape,
    origin: Mapping[str, str],
    kind: str,
    fields: Mapping[str, Any],
) -> None:
    """Replace the head in `folder`, in bfloat16; the old one is kept if that fails.

    `kind`: speculators_model_type. `fields`: those of config.json that only this kind has; `num_drafted` among them is
    the recommended draft length.
    """
    from safetensors.torch import save_file

    with open_folder(target) as source:
        architectures, size = source.config.get("architectures"), student.config.vocab_size
    tensors = {name.removeprefix("model."): value for name, value in student.trained.items()}
    if student.ids is not None:
        ids = student.ids.cpu()
        tensors |= {HEAD: student._head, "d2t": ids - torch.arange(len(ids))}
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True)
    if shape.draft is not None:  # what it has of its own, and is not trained
        files, names = open_head(shape.draft), ("embed_tokens.weight", HEAD)
        tensors = {name: stored(files, name) for name in names if name in files} | tensors
    own = dict(fields)
    proposal = {"proposal_type": "greedy", "speculative_tokens": own.pop("num_drafted")}
    config = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": size if student.ids is None else len(student.ids),
        "target_hidden_size": None,
        **own,
        "transformer_layer_config": dict(student.layer),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": origin.get("target"), "architectures": architectures},
        },
        "outpace": {name: origin[name] for name in DIGESTS if name in origin},
    }
    with replaced_folder(folder) as unfinished:
        write_json(unfinished / "config.json", config)
        made = {
            name: value.detach().cpu().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
            for name, value in tensors.items()
        }
        save_file(made, unfinished / SINGLE, {"format": "pt"})
