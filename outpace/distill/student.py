"""Defines a trainable model of the Llama family: torch over Hugging Face weight names, float32, packed sequences."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, TrainingBatch
from outpace.distill.draft_shape import (
    LAYERS,
    DraftShape,
    draft_config,
    pick_layers,
    read_vocab_ids,
    resolve_draft,
    save_vocab_ids,
)
from outpace.distill.losses import LossOptions, loss
from outpace.models.files.cache import replaced_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.find import open_folder
from outpace.models.files.reading import write_json
from outpace.models.llama.config.draft_vocab import FILE as VOCAB_FILE
from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.gemma import ATTENTION_NORM, MLP_OUTPUT_NORM
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.config.phi import GATE_UP, QKV
from outpace.models.llama.config.rope import Rotation
from outpace.models.llama.torch.rope_tables import frequencies_of
from outpace.models.llama.weight_sources import source_of
from outpace.models.options import has_bfloat16

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FROZEN = (EMBEDDING, HEAD)  # tensors that are not trained
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json"),
)


class Student:
    """A draft in training, here of the kind standalone: a small model of the target's architecture, from some of its
    layers or an earlier draft. Subclasses are the other kinds.

    `ids`: its reduced vocabulary; None: all tokens. `taps`: numbers of layers after which it reads the target's hidden
    states.
    """

    learning_rate: ClassVar[float] = 1e-3  # the default for this kind
    taps: tuple[int, ...] = ()

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Tensor], ids: Tensor | None) -> None:
        """Copy `tensors`, float32 by Hugging Face names."""
        self.config, self.ids = config, ids
        self.tensors = {name: one.detach().clone().requires_grad_(name not in FROZEN) for name, one in tensors.items()}
        head = self.tensors[EMBEDDING if config.tie_embeddings else HEAD]
        self._head = head if ids is None else head[ids]  # [ids, hidden]

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of layers after which a draft reads the hidden states of a target of `num_layers`."""
        return ()

    @classmethod
    def shape_from_options(cls, layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
        """Return the shape for these options; `init` may also be the folder of a draft to train further, or `shipped`
        for the one that comes with outpace for the target of this name.

        UserError for options that the kind does not use, and for a shape together with a draft, which has its own.
        """
        if init == LAYERS:
            return DraftShape(layers, vocab)
        shape = DraftShape.of_draft(Path(resolve_draft("init", init, target)))
        if DraftShape(layers, vocab) != DraftShape():
            raise UserError(f"the draft {init} has a shape of its own: leave out --layers and --vocab")
        return shape

    @classmethod
    def vocab_ids(cls, folder: Path) -> Tensor | None:
        """Return the reduced vocabulary of an earlier draft in `folder`, int64 [ids]; None if it has all tokens."""
        return read_vocab_ids(folder / VOCAB_FILE)

    @classmethod
    def trained_shapes(
        cls, target: Checkpoint, shape: DraftShape, taps: Sequence[int] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained tensors; UserError for a shape or an earlier draft that does not fit the
        target."""
        shapes = tensor_shapes(from_dict(draft_config(target.config, shape)))
        trained = {name: size for name, size in shapes.items() if name not in FROZEN}
        if shape.draft is not None:
            with Checkpoint.open(shape.draft) as draft:
                draft.check_shapes(trained)
        return trained

    @classmethod
    def new(
        cls, target: Path, shape: DraftShape, ids: Tensor | None, device: str = "cpu", taps: Sequence[int] = ()
    ) -> Student:
        """Return the draft as its training begins. Its embeddings and output layer are the target's."""
        with open_folder(target) as checkpoint:
            config = from_dict(draft_config(checkpoint.config, shape))
            layers = pick_layers(shape, checkpoint.read_config().num_layers)
            tensors = {name: checkpoint.tensor(source_of(name, layers)).float() for name in tensor_shapes(config)}
            trained = Student.trained_shapes(checkpoint, shape)
        if shape.draft is not None:
            with Checkpoint.open(shape.draft) as draft:
                tensors |= {name: draft.tensor(name).float() for name in trained}
        tensors = {name: value.to(device) for name, value in tensors.items()}
        return cls(config, tensors, None if ids is None else ids.to(device))

    def write(self, folder: Path, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
        """Replace the draft in `folder`; the old one is kept if that fails. `origin`: what wrote the text."""
        with open_folder(target) as source:
            config = draft_config(source.config, shape)
        self.save(folder, config, target)

    def save(self, folder: Path, config: Mapping[str, Any], target: Path) -> None:
        """Replace the draft in `folder`; `config` is its config.json. The old draft is kept if that fails.

        Weights are stored in bfloat16 under their Hugging Face names. A draft with a reduced vocabulary has its token
        ids in the int32 tensor `ids` of draft_vocab.safetensors.
        """
        from safetensors.torch import save_file

        with replaced_folder(folder) as unfinished:
            write_json(unfinished / "config.json", config)
            save_file(stored_tensors(self.tensors), unfinished / SINGLE, {"format": "pt"})
            if self.ids is not None:
                save_vocab_ids(unfinished / VOCAB_FILE, self.ids)
            copy_files(target, unfinished, TOKENIZER_FILES)

    @classmethod
    def frozen(cls, config: LlamaConfig, tensors: Mapping[str, Tensor]) -> Student:
        """Return a student for `hidden_states` only: `tensors` are not copied or trained, and need no output layer."""
        student = cls.__new__(cls)
        student.config, student.ids, student.tensors = config, None, dict(tensors)
        return student

    @property
    def device(self) -> torch.device:
        return self.tensors[EMBEDDING].device

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that training changes, by name."""
        return {name: value for name, value in self.tensors.items() if value.requires_grad}

    def loss(self, batch: TrainingBatch, options: LossOptions) -> Tensor:
        """Return the mean loss per position."""
        return loss(self.logits(batch.packed), batch.labels, options)

    def right_chains(self, batch: TrainingBatch, length: int) -> Tensor:
        """For a chain drafted at each scored position, return whether its tokens are the target's likeliest ones, given
        the target's text before them: bool [scored, length]. Values past an answer's end mean nothing."""
        right = self.logits(batch.packed).argmax(1) == batch.labels.top[:, 0]
        return torch.stack([right.roll(-place) for place in range(length)], 1)

    def logits(self, batch: PackedRows, mlp_bias: Tensor | None = None) -> Tensor:
        """Return the logits of the draft's vocabulary at the positions that have a loss: float32 [scored, ids]."""
        (x,) = self.hidden_states(batch, [self.config.num_layers], mlp_bias)
        return F.linear(self._normed(x.flatten(0, 1)[batch.scored], NORM), self._head).float()

    def hidden_states(self, batch: PackedRows, layers: Sequence[int], mlp_bias: Tensor | None = None) -> list[Tensor]:
        """Return the residual stream after each number of layers in `layers`: [rows, length, hidden] each.

        `mlp_bias` [rows, length, layers, MLP width] is added to the MLPs' up projections.
        """
        config, tables = self.config, dict[int | None, tuple[Tensor, Tensor]]()
        for number, rotation in enumerate(config.rotations):
            tables[number] = rope_tables(config.head_dim, rotation, batch.positions)
        masks = {window: causal_mask(batch, window) for window in map(config.window, range(config.num_layers))}
        x = F.embedding(batch.tokens, self.tensors[EMBEDDING]).float()  # [rows, length, hidden]
        x = x if config.embedding_scale == 1.0 else x * config.embedding_scale
        found = {0: x}
        for layer in range(config.num_layers):
            prefix, mask = f"model.layers.{layer}.", masks[config.window(layer)]
            normed = self._normed(x, prefix + "input_layernorm.weight")
            query, key, value = self._heads(prefix, normed, tables.get(config.rotation(layer)))
            attended = attention(query, key, value, mask.to(query.dtype), config.attention_scale)
            x = self._finish_layer(prefix, x, attended, None if mlp_bias is None else mlp_bias[:, :, layer])
            if layer + 1 in layers:
                found[layer + 1] = x
        return [found[layer] for layer in layers]

    def _heads(self, prefix: str, h: Tensor, table: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of normed inputs, a key for each query head: [rows, heads, length, d].

        Without a rotary `table` they have no positional embedding.
        """
        config = self.config
        if config.fused:
            counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            parts: Iterable[Tensor] = self._linear(prefix + QKV, h).unflatten(2, (-1, config.head_dim)).split(counts, 2)
        else:
            parts = (
                self._linear(f"{prefix}self_attn.{name}_proj", h).unflatten(2, (-1, config.head_dim)) for name in "qkv"
            )
        query, key, value = parts
        if config.head_norm:
            query = self._normed(query.float(), prefix + "self_attn.q_norm.weight")
            key = self._normed(key.float(), prefix + "self_attn.k_norm.weight")
        if table is not None:
            query, key = (_rotated(part.float(), *table) for part in (query, key))
        query, key = (part.to(value.dtype).transpose(1, 2) for part in (query, key))
        groups = config.num_heads // config.num_kv_heads
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value.transpose(1, 2)))
        return query, key, value

    def _finish_layer(self, prefix: str, x: Tensor, attended: Tensor, mlp_bias: Tensor | None = None) -> Tensor:
        """Add what was attended to, [rows, heads, length, d], and the MLP's output."""
        config = self.config
        attended = self._linear(prefix + "self_attn.o_proj", attended.transpose(1, 2).flatten(2))
        x = self._added(x, attended, prefix + ATTENTION_NORM)
        h = self._normed(x, f"{prefix}{config.mlp_norm}.weight")
        if config.fused:
            gate, up = self._linear(prefix + GATE_UP, h).chunk(2, dim=-1)
        else:
            gate, up = (self._linear(f"{prefix}mlp.{name}_proj", h) for name in ("gate", "up"))
        up = up if mlp_bias is None else up + mlp_bias
        gate = F.gelu(gate, approximate="tanh") if config.activation == GELU else F.silu(gate)
        return self._added(x, self._linear(prefix + "mlp.down_proj", gate * up), prefix + MLP_OUTPUT_NORM)

    def _added(self, x: Tensor, branch: Tensor, norm: str) -> Tensor:
        """Add a sublayer's output to the residual, after a norm in models with sandwich norms."""
        return x + (self._normed(branch.float(), norm + ".weight") if self.config.sandwich_norms else branch)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """Apply an RMS norm with the weights of this name: [..., hidden]."""
        weight, offset = self.tensors[name], self.config.norm_offset
        return F.rms_norm(x, x.shape[-1:], weight + offset if offset else weight, self.config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))


class PackedTarget:
    """The target's layers up to the last one of `taps`; they are loaded on first use.

    They compute the hidden states during training, for text that does not hold them: on a GPU this is faster than
    reading them from a disk, and the captured loop that writes the text stores none. Matrices are bfloat16 on a GPU
    that supports it, else float32.
    """

    def __init__(self, target: Path, taps: Sequence[int], device: str) -> None:
        self._folder, self._taps, self._device = target, tuple(taps), torch.device(device)
        self._is_half = self._device.type == "cuda" and has_bfloat16(self._device)

    @torch.no_grad()
    def taps(self, batch: PackedRows) -> Tensor:
        """Return the residual stream after the layers `taps`: float32 [rows, length, taps * hidden]."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_half):
            return torch.cat([x.float() for x in self._layers.hidden_states(batch, self._taps)], -1)

    @cached_property
    def _layers(self) -> Student:
        with open_folder(self._folder) as checkpoint:
            whole = checkpoint.read_config()
            config = whole.of_layers(range(self._taps[-1]))
            matrices = torch.bfloat16 if self._is_half else torch.float32
            tensors = {
                name: checkpoint.tensor(name).to(self._device, matrices if len(shape) > 1 else torch.float32)
                for name, shape in tensor_shapes(config).items()
                if name.startswith("model.layers.") or name == EMBEDDING
            }
        return Student.frozen(config, tensors)


def stored_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as files store them: numbers with a fraction in bfloat16."""
    moved = {name: value.detach().cpu() for name, value in tensors.items()}
    return {
        name: value.to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in moved.items()
    }


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copy the files that `source` has."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute softmax attention, [rows, heads, length, d]; `mask` is added to the scores.

    On a CPU, two products and a softmax take half the time of torch's fused function, forward and backward together.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = (query * scale) @ key.transpose(2, 3)
    return (scores.float() + mask).softmax(-1).to(value.dtype) @ value


def causal_mask(batch: PackedRows, window: int | None) -> Tensor:
    """Return 0 where a token attends to another one, within the last `window` tokens, else -inf.

    The shape is [rows, 1, length, length]; without a window a token attends to all earlier ones of its sequence.
    """
    length, positions = batch.tokens.shape[1], batch.positions
    visible = batch.sequences[:, :, None] == batch.sequences[:, None]
    visible &= torch.ones(length, length, dtype=torch.bool, device=visible.device).tril()
    if window is not None:
        visible &= positions[:, :, None] - positions[:, None] < window
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None]


def rope_tables(head_dim: int, rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of a rotary embedding, times its scaling's gain: [...] to [..., 1, d / 2] each."""
    angles = positions[..., None, None] * _frequencies(head_dim, rotation, positions.device)
    return angles.cos() * rotation.gain, angles.sin() * rotation.gain


@lru_cache(maxsize=64)
def _frequencies(head_dim: int, rotation: Rotation, device: torch.device) -> Tensor:
    """Return the frequencies of the rotated pairs; cached, because a copy to the device waits for it."""
    return frequencies_of(rotation.dim or head_dim, rotation._replace(dim=0)).to(device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first entries of each head, the halves against each other; cos and sin [..., pairs]."""
    rotary, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
