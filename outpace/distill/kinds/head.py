"""The base of the kinds of heads: initial weights, and files in the format of speculators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import TrainingBatch, follows
from outpace.distill.draft_shape import LAYERS, DraftShape
from outpace.distill.student import EMBEDDING, HEAD, Student, stored_tensors
from outpace.distill.writer import tap_list
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

    kind: ClassVar[str]  # as in `models/heads/config.py`
    name: ClassVar[str]  # as in --kind, and speculators_model_type
    own_layers: ClassVar[str] = ""  # the layers that all heads of this kind have, as in "one layer"; "": any

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

    @classmethod
    def new_head(
        cls, config: Mapping[str, Any], sizes: LlamaConfig, shape: DraftShape, taps: Sequence[int]
    ) -> tuple[HeadConfig, Mapping[str, Any]]:
        """Return the configuration of a new head for a target with this config.json, and its
        transformer_layer_config."""
        raise NotImplementedError

    @classmethod
    def check(cls, head: HeadConfig, folder: Path) -> None:
        """Raise UserError if the head in `folder` is one whose training cannot continue."""

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles | None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained tensors, by name; `files` are those of a head to continue."""
        raise NotImplementedError

    @classmethod
    def initial(
        cls, target: Checkpoint, sizes: LlamaConfig, shape: DraftShape, name: str, size: tuple[int, ...]
    ) -> Tensor:
        """Return the initial value of a new head's tensor of this name and size."""
        raise NotImplementedError

    def complete(self, target: Checkpoint, files: HeadFiles | None) -> None:
        """Set what only this kind needs when training begins; `files` are those of a head to continue."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of config.json that only this kind has; `num_drafted`: the recommended draft length."""
        raise NotImplementedError

    def normed_taps(self, taps: Tensor, prefix: str = "") -> Tensor:
        """Return the target's hidden states, each normed: [rows, length, taps * hidden]."""
        parts = taps.chunk(len(self.taps), -1)
        return torch.cat([self._normed(part, f"{prefix}fc_norm.{n}.weight") for n, part in enumerate(parts)], -1)

    def right_slots(self, batch: TrainingBatch, scores: Iterable[Tensor]) -> list[Tensor]:
        """Return for each slot's logits [scored, ids] whether its tokens are the target's likeliest: bool [scored].

        An answer's first token is not drafted, so a chain that starts with it counts as wrong.
        """
        best, is_drafted = batch.labels.top[:, 0], follows(batch, 1)
        return [is_drafted & (found.argmax(1) == best.roll(-slot)) for slot, found in enumerate(scores)]

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))

    @classmethod
    def shape_from_options(cls, layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
        """Return the shape of a new head, or of the one in the folder `init`; UserError for other options."""
        if layers != DraftShape.layers and cls.own_layers:
            raise UserError(
                f"--layers is {layers}, and a head of the kind {cls.name} has {cls.own_layers}: leave it out"
            )
        if init == LAYERS:
            return DraftShape(layers, vocab)
        if layers != DraftShape.layers:
            raise UserError(f"the head {init} has layers of its own: leave out --layers")
        path = Path(init)
        if not path.is_dir() or kind_of_head(path) != cls.kind:
            article = "an" if cls.kind[0] in "AEIOU" else "a"
            raise UserError(
                f"init is {init!r}, for the kind {cls.name} it must be layers or the folder of {article} {cls.kind}"
                " head"
            )
        if vocab:
            raise UserError(f"the head {init} has a vocabulary of its own: leave out --vocab")
        files = open_head(path)
        return DraftShape(layers, prod(files.shape("d2t")) if "d2t" in files else 0, path)

    @classmethod
    def vocab_ids(cls, folder: Path) -> Tensor | None:
        """Return the reduced vocabulary of the head in `folder`, in ascending order."""
        files = open_head(folder)
        stored = np.arange(files.shape("d2t")[0]) + files.array("d2t") if "d2t" in files else None
        return None if stored is None else torch.from_numpy(np.sort(stored))

    @classmethod
    def trained_shapes(
        cls, target: Checkpoint, shape: DraftShape, taps: Sequence[int] = ()
    ) -> dict[str, tuple[int, ...]]:
        head, _, files = cls.describe(target, shape, taps)
        return cls.shapes(head, files)

    @classmethod
    def describe(
        cls, target: Checkpoint, shape: DraftShape, taps: Sequence[int]
    ) -> tuple[HeadConfig, Mapping[str, Any], HeadFiles | None]:
        """Return a head's configuration, its transformer_layer_config, and the files to continue from (None: a new
        head). UserError if these do not fit the target or the taps."""
        sizes = target.read_config()
        if shape.draft is None:
            return *cls.new_head(target.config, sizes, shape, taps), None
        files = open_head(shape.draft)
        head = read_head(files, target.config, sizes.max_positions, sizes.num_layers)
        draft_ids(files, head)  # UserError for tokens that the target does not have
        layer = fields_of(files.config, "transformer_layer_config") or files.config
        if head.taps != tuple(taps):
            own = tap_list(head.taps)
            raise UserError(f"the head {shape.draft} reads the layers {own}, not {tap_list(taps)}: name --taps {own}")
        cls.check(head, shape.draft)
        left_out = {*IGNORED_IN_LAYER, "dflash_config"}  # z-lab's files have it next to the fields of the layers
        return head, {name: value for name, value in layer.items() if name not in left_out}, files

    @classmethod
    def new(
        cls, target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
    ) -> HeadStudent:
        """Return a new head, or the head to continue training."""
        with open_folder(target) as checkpoint:
            head, layer, files = cls.describe(checkpoint, shape, taps)
            shapes, sizes = cls.shapes(head, files), checkpoint.read_config()
            embedding = checkpoint.tensor(EMBEDDING).float()
            output = embedding if sizes.tie_embeddings else checkpoint.tensor(HEAD).float()
            output = output if ids is None else output[ids]
            if files is None:
                tensors = {name: cls.initial(checkpoint, sizes, shape, name, size) for name, size in shapes.items()}
            else:
                tensors = {name: stored(files, name.removeprefix("model.")) for name in shapes}
                order = draft_ids(files, head)
                if HEAD in files:
                    output = stored(files, HEAD)[() if order is None else np.argsort(order)]
                if "embed_tokens.weight" in files:
                    embedding = stored(files, "embed_tokens.weight")
            student = cls(head, layer, tensors | {EMBEDDING: embedding}, output, ids, device)
            student.complete(checkpoint, files)
        return student

    def write(self, folder: Path, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
        """Replace the head in `folder`, in bfloat16 and in the format of speculators; the old one is kept if that
        fails."""
        from safetensors.torch import save_file

        with open_folder(target) as source:
            architectures, size = source.config.get("architectures"), self.config.vocab_size
        tensors = {name.removeprefix("model."): value for name, value in self.trained.items()}
        if self.ids is not None:
            ids = self.ids.cpu()
            tensors |= {HEAD: self._head, "d2t": ids - torch.arange(len(ids))}
            tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True)
        if shape.draft is not None:  # what it has of its own, and is not trained
            files, names = open_head(shape.draft), ("embed_tokens.weight", HEAD)
            tensors = {name: stored(files, name) for name in names if name in files} | tensors
        own = self.fields()
        proposal = {"proposal_type": "greedy", "speculative_tokens": own.pop("num_drafted")}
        config = {
            "speculators_model_type": self.name,
            "speculators_version": "0.9.0",
            "draft_vocab_size": size if self.ids is None else len(self.ids),
            "target_hidden_size": None,
            **own,
            "transformer_layer_config": dict(self.layer),
            "speculators_config": {
                "algorithm": self.name,
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {"name_or_path": origin.get("target"), "architectures": architectures},
            },
            "outpace": {name: origin[name] for name in DIGESTS if name in origin},
        }
        with replaced_folder(folder) as unfinished:
            write_json(unfinished / "config.json", config)
            save_file(stored_tensors(tensors), unfinished / SINGLE, {"format": "pt"})


def layer_fields(target: Mapping[str, Any], sizes: LlamaConfig) -> dict[str, Any]:
    """Return the transformer_layer_config of a new head of one layer, which is like the target's."""
    layer = {name: target[name] for name in COPIED if target.get(name) is not None}
    if "rope_type" in (target.get("rope_parameters") or {}):  # one for all layers
        layer["rope_parameters"] = target["rope_parameters"]
    model_type = "qwen3" if sizes.head_norm else "llama"
    layer |= {"model_type": model_type, "num_hidden_layers": 1, "head_dim": sizes.head_dim}
    layer |= {"hidden_act": "silu", "rope_theta": sizes.rope_theta, "tie_word_embeddings": False}
    return layer | {"attention_bias": sizes.attention_bias}


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
