"""The kind eagle3: a decoder layer that reads the target's hidden states, in the public format of speculators.

EAGLE-3, Li et al., arXiv:2503.01840. Slot t reads a feature of position t and token t + 1, and predicts token t + 2.
Training also runs STEPS - 1 draft steps, whose slots read the outputs of the step before. `models/heads/eagle3.py` runs
the heads that this module writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch
from outpace.distill.kinds.standalone import LAYERS, DraftShape, target_config
from outpace.distill.losses import LossOptions, loss
from outpace.distill.student import EMBEDDING, HEAD, NORM, Student, causal_mask, rope_tables
from outpace.distill.taps import tap_list
from outpace.models.files.cache import replaced_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.find import open_folder
from outpace.models.files.reading import write_json
from outpace.models.heads.config import EAGLE3, HeadConfig, fields_of
from outpace.models.heads.files import HeadFiles, open_head
from outpace.models.heads.load import kind_of_head
from outpace.models.heads.reader import IGNORED_IN_LAYER, TAPS, draft_ids, layer_shapes, read_head
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

STEPS = 3  # draft steps in training, and the recommended draft length
DECAY = 0.8  # factor on the loss from one draft step to the next
PREFIX, FC = "model.layers.0.", "model.fc.weight"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COPIED = (  # fields of the target's config.json that describe the layer
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "max_position_embeddings",
    "vocab_size",
)


class Eagle3Student(Student):
    """The weights of a head in training."""

    def __init__(
        self,
        head: HeadConfig,
        layer: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        output: Tensor,
        ids: Tensor | None,
    ) -> None:
        """`layer`: the head's transformer_layer_config. `tensors`: those to train, and EMBEDDING. `output` [ids,
        hidden]: the rows of the output layer for the tokens `ids`; None: all tokens."""
        super().__init__(replace(head.layers, tie_embeddings=True), tensors, None)
        self.head, self.layer, self.taps, self.ids, self._head = head, layer, head.taps, ids, output

    def loss(self, batch: TrainingBatch, options: LossOptions) -> Tensor:
        total, weights = torch.zeros((), device=self.device, requires_grad=True), 0.0
        for step, outputs in enumerate(self.steps(batch.packed, STEPS)):
            roots = torch.nonzero(_follows(batch, 1) & _follows(batch, -step)).squeeze(1)
            if len(roots):
                found = self._scores(outputs, batch.packed.scored[roots] - 1)
                total = total + DECAY**step * loss(found, batch.labels[roots + step], options)
                weights += DECAY**step
        return total / max(weights, 1.0)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        """As in `Student`. An answer's first token is not drafted, so a chain that starts with it counts as wrong."""
        best, slots = batch.labels.top[:, 0], (batch.packed.scored - 1).clamp_min(0)
        return torch.stack(
            [
                _follows(batch, 1) & (self._scores(outputs, slots).argmax(1) == best.roll(-step))
                for step, outputs in enumerate(self.steps(batch.packed, length))
            ],
            1,
        )

    def steps(self, batch: PackedRows, count: int) -> list[Tensor]:
        """Run the layer once over the text, and `count` - 1 draft steps from every slot: outputs before the final norm,
        [rows, length, hidden] each. Step n of slot t reads token t + 1 + n and predicts the one after it."""
        config, head = self.config, self.head
        x, mask = self.fuse(batch), causal_mask(batch, None)
        keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(count):
            table = rope_tables(config.head_dim, config.rotations[0], batch.positions + step)
            embedded = F.embedding(batch.tokens.roll(-1 - step, 1), self.tensors[EMBEDDING])
            normed = self._normed(x, PREFIX + "hidden_norm.weight")
            both = torch.cat([self._normed(embedded, PREFIX + "input_layernorm.weight"), normed], -1)
            query, key, value = self._heads(PREFIX, both, table)
            keys.append(key)
            values.append(value)
            attended = _step_attention(query, keys, values, mask, config.attention_scale)
            x = self._finish_layer(PREFIX, normed if head.norm_before_residual else x, attended)
            found.append(x)
            x = self._normed(x, NORM) if head.norm_output else x
        return found

    def fuse(self, batch: PackedRows) -> Tensor:
        """Return the features of the target's hidden states: [rows, length, hidden]."""
        assert batch.taps is not None
        taps = batch.taps
        if self.head.fc_norm:
            parts = taps.chunk(len(self.taps), -1)
            taps = torch.cat([self._normed(part, f"model.fc_norm.{n}.weight") for n, part in enumerate(parts)], -1)
        if self.head.norm_before_fc:
            taps = self._normed(taps, "model.input_norm.weight")
        return self._linear("model.fc", taps).float()

    def _scores(self, outputs: Tensor, slots: Tensor) -> Tensor:
        normed = self._normed(outputs.flatten(0, 1)[slots], NORM)
        return F.linear(normed, self._head).float() * self.head.logit_scale


def _follows(batch: TrainingBatch, places: int) -> Tensor:
    """Return whether the label `places` before (after, if negative) each one is of the same answer: bool [scored]."""
    answers = batch.labels.answers
    found = answers.roll(places) == answers
    found[: max(places, 0)] = False
    found[len(found) + min(places, 0) :] = False
    return found


def _step_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor, scale: float
) -> Tensor:
    """Attend to the text's slots by `mask`, and to the slots of later steps at the same position.

    Query, and keys and values of each step: [rows, heads, length, d]. Keys and values begin with those of the text.
    """
    length = query.shape[2]
    scores = [(query * scale) @ keys[0].transpose(2, 3) + mask]
    scores += [(query * scale * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([part.float() for part in scores], -1).softmax(-1).to(values[0].dtype)
    attended = weights[..., :length] @ values[0]
    for place, value in enumerate(values[1:], length):
        attended = attended + weights[..., place, None] * value
    return attended


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose hidden states heads read by default."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def shape_from_options(layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
    """Return the shape for these options: a new head, or the one in the folder `init`; UserError for others."""
    if layers != DraftShape.layers:
        raise UserError(f"--layers is {layers}, and a head of the kind eagle3 has one layer: leave it out")
    if init == LAYERS:
        return DraftShape(vocab=vocab)
    path = Path(init)
    if not path.is_dir() or kind_of_head(path) != EAGLE3:
        raise UserError(f"init is {init!r}, for the kind eagle3 it must be {LAYERS} or the folder of an EAGLE-3 head")
    if vocab:
        raise UserError(f"the head {init} has a vocabulary of its own: leave out --vocab")
    files = open_head(path)
    return DraftShape(vocab=prod(files.shape("d2t")) if "d2t" in files else 0, draft=path)


def vocab_ids(folder: Path) -> Tensor | None:
    """Return the reduced vocabulary of the head in `folder`, in ascending order."""
    files = open_head(folder)
    stored = np.arange(files.shape("d2t")[0]) + files.array("d2t") if "d2t" in files else None
    return None if stored is None else torch.from_numpy(np.sort(stored))


def trained_shapes(target: Checkpoint, shape: DraftShape, taps: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained tensors; UserError for a head that does not fit the target or the taps."""
    head, _, files = _describe(target, shape, taps)
    return _shapes(head, files)


def new_student(
    target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
) -> Eagle3Student:
    """Return a new head, which starts from the target's last layer, or the head to continue training."""
    with open_folder(target) as checkpoint:
        head, layer, files = _describe(checkpoint, shape, taps)
        shapes = _shapes(head, files)
        sizes = target_config(checkpoint)
        embedding = checkpoint.tensor(EMBEDDING).float()
        output = embedding if sizes.tie_embeddings else checkpoint.tensor(HEAD).float()
        output = output if ids is None else output[ids]
        tensors = {name: _initial(checkpoint, sizes, name, size) for name, size in shapes.items()}
    if files is not None:
        tensors = {name: _stored(files, name.removeprefix("model.")) for name in shapes}
        order = draft_ids(files, head)
        if HEAD in files:
            output = _stored(files, HEAD)[() if order is None else np.argsort(order)]
        embedding = _stored(files, "embed_tokens.weight") if "embed_tokens.weight" in files else embedding
    tensors = {name: value.to(device) for name, value in {**tensors, EMBEDDING: embedding}.items()}
    return Eagle3Student(head, layer, tensors, output.to(device), None if ids is None else ids.to(device))


def write(folder: Path, student: Student, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
    """Replace the head in `folder`, in bfloat16; the old one is kept if that fails."""
    from safetensors.torch import save_file

    assert isinstance(student, Eagle3Student)
    with open_folder(target) as source:
        architectures, size = source.config.get("architectures"), student.config.vocab_size
    tensors = {name.removeprefix("model."): value for name, value in student.trained.items()}
    if student.ids is not None:
        ids = student.ids.cpu()
        tensors |= {HEAD: student._head, "d2t": ids - torch.arange(len(ids))}
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, ids, True)
    proposal = {"proposal_type": "greedy", "speculative_tokens": STEPS, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": size if student.ids is None else len(student.ids),
        "target_hidden_size": None,
        TAPS: list(student.taps),
        **{flag: getattr(student.head, flag) for flag in FLAGS},
        "transformer_layer_config": dict(student.layer),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": origin.get("target"), "architectures": architectures},
        },
        "outpace": {name: origin[name] for name in ("tokenizer", "template", "weights", "runtime") if name in origin},
    }
    with replaced_folder(folder) as unfinished:
        write_json(unfinished / "config.json", config)
        stored = {
            name: value.detach().cpu().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
            for name, value in tensors.items()
        }
        save_file(stored, unfinished / SINGLE, {"format": "pt"})


def _describe(
    target: Checkpoint, shape: DraftShape, taps: Sequence[int]
) -> tuple[HeadConfig, Mapping[str, Any], HeadFiles | None]:
    """Return the head's configuration, its transformer_layer_config, and the files to start from; None: a new head."""
    sizes = target_config(target)
    if shape.draft is not None:
        files = open_head(shape.draft)
        head = read_head(files, target.config, sizes.max_positions, sizes.num_layers)
        draft_ids(files, head)  # UserError for tokens that the target does not have
        layer = fields_of(files.config, "transformer_layer_config") or files.config
        if head.taps != tuple(taps):
            own = tap_list(head.taps)
            raise UserError(f"the head {shape.draft} reads the layers {own}, not {tap_list(taps)}: name --taps {own}")
        if head.layers.num_layers > 1 or head.layers.window(0) is not None:
            raise UserError(
                f"the head {shape.draft} has several layers or a sliding window: only one layer without a window is"
                " trained"
            )
        return head, {name: value for name, value in layer.items() if name not in IGNORED_IN_LAYER}, files
    layer = {name: target.config[name] for name in COPIED if target.config.get(name) is not None}
    if "rope_type" in (target.config.get("rope_parameters") or {}):  # one for all layers
        layer["rope_parameters"] = target.config["rope_parameters"]
    kind = "qwen3" if sizes.head_norm else "llama"
    layer |= {"model_type": kind, "num_hidden_layers": 1, "head_dim": sizes.head_dim, "hidden_act": "silu"}
    layer |= {"rope_theta": sizes.rope_theta, "attention_bias": sizes.attention_bias, "tie_word_embeddings": False}
    layers = replace(from_dict(layer), takes_features=True, norms_features=True, output_bias=sizes.attention_bias)
    return HeadConfig(EAGLE3, layers, tuple(taps), shape.vocab or sizes.vocab_size, sizes.hidden_size), layer, None


def _shapes(head: HeadConfig, files: HeadFiles | None) -> dict[str, tuple[int, ...]]:
    hidden, inputs = head.layers.hidden_size, len(head.taps) * head.target_width
    shapes = {PREFIX + name: shape for name, shape in layer_shapes(head.layers, 0).items()}
    shapes |= {NORM: (hidden,), FC: (hidden, inputs)}
    extra = [
        name for name in (files.tensors if files else ()) if name.startswith(("fc.bias", "fc_norm.", "input_norm."))
    ]
    return shapes | {f"model.{name}": files.shape(name) for name in extra if files}


def _initial(target: Checkpoint, sizes: LlamaConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor's initial value: copied from the target's last layer, and zero in columns that multiply
    embeddings."""
    if name == FC:  # passes the last hidden state on
        return torch.eye(shape[0], shape[0]).repeat(1, shape[1] // shape[0]) * (
            torch.arange(shape[1]) >= shape[1] - shape[0]
        )
    if name.endswith("input_layernorm.weight"):
        return torch.ones(shape)
    source = name.replace(PREFIX, f"model.layers.{sizes.num_layers - 1}.").replace("hidden_norm", "input_layernorm")
    source = source.replace("post_attention_layernorm", sizes.mlp_norm)
    found = target.tensor(source).float() if source in target.names() else None
    if found is not None and len(shape) == 1 and "norm" in name:
        found = found + sizes.norm_offset
    if found is not None and len(shape) == 2 and found.shape[1] * 2 == shape[1]:
        found = torch.cat([torch.zeros_like(found), found], 1)
    if found is not None and found.shape == shape:
        return found
    if len(shape) == 1:
        return torch.ones(shape) if "norm" in name else torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * shape[1] ** -0.5


def _stored(files: HeadFiles, name: str) -> Tensor:
    return torch.from_numpy(np.array(files.array(name), np.float32))
