"""EAGLE-3 heads: every layout, the forward against the formulas, and what a bad file or a wrong target gets."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import heads
import numpy as np
import pytest
import torch
import transformers
from files import model_folder
from heads import (
    LAYERS,
    PARENTS,
    VARIANTS,
    VOCAB,
    WIDTH,
    Reference,
    head_config,
    head_tensors,
    layers_of,
    write_head,
)

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.files.gguf.header import open_gguf_model
from outpace.models.heads import files as head_files
from outpace.models.heads.config import head_kind
from outpace.models.heads.files import target_of_head
from outpace.models.llama.native import runtime as native_runtime
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

RUNTIMES = ("llama", "native")
PROMPT = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[str, Loaded]:
    path = model_folder(folder, "target", num_hidden_layers=LAYERS)
    captured = load_model(path, dtype="float32", graphs="eager")
    return {"llama": load_model(path, dtype="float32"), "native": load_model(path), "captured": captured}


def load(targets: dict[str, Loaded], path: Path, runtime: str = "llama", **options: Any) -> Any:
    given = {"dtype": "int8", "kv_dtype": "float32"} if runtime == "native" else {}
    return load_draft(path, targets[runtime], **(given | options)).model


@cache
def hidden_states(seed: int = 0, count: int = PROMPT) -> np.ndarray:
    """The target's hidden states of a prompt: [taps, count, width]."""
    return np.random.default_rng(seed).standard_normal((3, count, WIDTH)).astype(np.float32)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed + 50).integers(0, VOCAB, count).tolist()


def give(model: Any, session: Any, hidden: np.ndarray) -> None:
    """Queue the features of these hidden states."""
    session.add_features(
        model.fuse(hidden if isinstance(model.layers, native_runtime.NativeLlama) else torch.from_numpy(hidden))
    )


def opened(model: Any, seed: int, cuts: Sequence[int] = (5, 9)) -> tuple[Any, Part]:
    """A session that has read a prompt in pieces, and the part that scores a tree below it in steps."""
    session, tokens = model.open(100, 60), tokens_of(PROMPT + len(PARENTS) - 1, seed)
    hidden = hidden_states(seed)
    for start, end in zip((0, *cuts), (*cuts, PROMPT - 1), strict=True):
        give(model, session, hidden[:, start:end])
        model.score_sparse([chain(session, tokens[start:end])])
        session.keep(range(end - start))
    give(model, session, hidden[:, PROMPT - 1 :])
    return session, Part(session, tokens[PROMPT - 1 :], PARENTS, range(len(PARENTS)))


def tree_logits(model: Any, seeds: Sequence[int]) -> list[np.ndarray]:
    """Logits of a tree's nodes for texts of these seeds, all in one batch: [nodes, vocab] each."""
    parts = [layers_of(opened(model, seed)[1]) for seed in seeds]
    found: list[list[np.ndarray]] = [[] for _ in seeds]
    for step in zip(*parts, strict=True):
        scored = np.asarray(model.score_sparse(step).to_dense())
        for number, rows in enumerate(np.split(scored, len(seeds))):
            found[number].append(rows)
    return [np.concatenate(rows) for rows in found]


def expected(reference: Reference, seed: int) -> np.ndarray:
    """The same by the formulas, path by path."""
    tokens, rows = tokens_of(PROMPT + len(PARENTS) - 1, seed), []
    for node in range(len(PARENTS)):
        path = [node]
        while PARENTS[path[0]] != PREFIX:
            path.insert(0, PARENTS[path[0]])
        text = [*tokens[: PROMPT - 1], *(tokens[PROMPT - 1 + one] for one in path)]
        rows.append(reference(hidden_states(seed), text)[0][-1])
    wide = np.full((len(rows), VOCAB), -np.inf)
    wide[:, np.clip(reference.ids, 0, VOCAB - 1)] = np.array(rows)
    return wide


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of logits, infinite where only one of them is -inf."""
    same = np.isneginf(found) & np.isneginf(wanted)
    with np.errstate(invalid="ignore"):
        return float(np.where(same, 0.0, np.abs(found - wanted)).max())


@pytest.mark.parametrize("runtime", [*RUNTIMES, "captured"])
@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
def test_mask_slots_are_those_of_the_formulas(
    layout: str, runtime: str, targets: dict[str, Loaded], tmp_path: Path
) -> None:
    """P-EAGLE: the root's slot and three mask slots in one forward, after texts of a batch."""
    config, tensors = head_config(**heads.P_EAGLE), head_tensors(head_config(**heads.P_EAGLE))
    path = heads.LAYOUTS[layout](tmp_path / "head", config, tensors)
    model, reference = load(targets, path, runtime), Reference(config, tensors)
    assert (model.spec.kind, model.spec.mask_token) == ("P-EAGLE", heads.MASK)
    sessions = [opened(model, seed) for seed in (0, 1)]
    parts = []
    for session, part in sessions:
        session.add_features(model.mask_features(3))
        parts.append(Part(session, [part.tokens[0], *[heads.MASK] * 3], [PREFIX, 0, 1, 2], range(4)))
    found = np.split(np.asarray(model.score_sparse(parts).to_dense()), 2)
    for seed, logits in enumerate(found):
        wanted = np.full((4, VOCAB), -np.inf)
        rows = reference(hidden_states(seed), tokens_of(PROMPT + len(PARENTS) - 1, seed)[:PROMPT], 3)[0][-4:]
        wanted[:, reference.ids] = rows
        assert distance(logits, wanted) < (0.35 * np.std(rows) if runtime == "native" else 1e-4)


@pytest.mark.parametrize("methods", [None, [], {"a": 1}, 3, ["x"], [{"speculative_tokens": "x"}]], ids=str)
def test_proposal_methods_of_another_kind_say_no_length(
    methods: Any, targets: dict[str, Loaded], tmp_path: Path
) -> None:
    path = write_head(tmp_path / "head", "speculators")
    config = json.loads((path / "config.json").read_text())
    config["speculators_config"]["proposal_methods"] = methods
    (path / "config.json").write_text(json.dumps(config))
    assert load(targets, path).spec.draft_length is None


def test_a_verifier_that_is_no_object_is_named_with_its_file(tmp_path: Path) -> None:
    path = heads.write_folder(tmp_path / "head", {"speculators_config": 3}, {})
    with pytest.raises(UserError, match="speculators_config is 3, it must be an object") as error:
        target_of_head(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_type_that_is_not_read_gets_a_sentence(runtime: str, targets: dict[str, Loaded], tmp_path: Path) -> None:
    tensors = head_tensors(head_config())
    bytes_ = heads.write_folder(tmp_path / "bytes", head_config(), tensors | {"fc.weight": np.zeros((64, 192), "u1")})
    wide = tensors | {"fc.weight": tensors["fc.weight"].astype(float)}
    double = heads.LAYOUTS["gguf"](tmp_path / "double", head_config(), wide)
    for path, kind in ((bytes_, "U8"), (double, "F64")):
        with pytest.raises(UserError, match=f"tensor 'fc.weight' has type {kind}, which is not supported") as error:
            load(targets, path, runtime)
        assert str(path) in str(error.value)


def test_a_pickle_of_parameters_is_read(targets: dict[str, Loaded], tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", "pickled")
    held = torch.load(path / "pytorch_model.bin")
    kept = {name: torch.nn.Parameter(one) if one.is_floating_point() else one for name, one in held.items()}
    torch.save(kept, path / "pytorch_model.bin")
    load(targets, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.to_sparse(), r"stored as sparse_coo float32 \(cpu\), which is not supported"),
        (lambda one: one.to(torch.complex64), "stored as strided complex64"),
        (lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8), "stored as strided qint8"),
        (lambda one: one.to("meta"), r"stored as strided float32 \(meta\)"),
        (lambda one: one / 0, "is damaged: tensor 'norm.weight' holds values that are not finite"),
    ],
)
def test_a_tensor_of_a_pickle_that_is_not_read_gets_a_sentence(
    change: Any, said: str, targets: dict[str, Loaded], tmp_path: Path
) -> None:
    path = write_head(tmp_path / "head", "pickled")
    held = torch.load(path / "pytorch_model.bin")
    torch.save(held | {"norm.weight": change(held["norm.weight"])}, path / "pytorch_model.bin")
    with pytest.raises(UserError, match=said) as error:
        load(targets, path, "native")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention.head_count", 0),
        ("embedding_length", "x"),
        ("feed_forward_length", 1.5),
        ("attention.key_length", True),
        ("norm_before_residual", 7),
        ("norm_before_fc", "no"),
    ],
)
def test_a_gguf_field_of_the_wrong_kind_is_named(
    field: str, value: Any, targets: dict[str, Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_head(tmp_path / "head", "gguf")
    header = open_gguf_model(path)
    changed = header.metadata | {f"eagle3.{field}": value, "tokenizer.ggml.tokens": 0}
    monkeypatch.setattr(head_files, "open_gguf_model", lambda path: replace(header, metadata=changed))
    with pytest.raises(UserError, match=f"{field} is {value!r}, it must be ") as error:
        load(targets, path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["blk.0", "blk.0.weight", "blk."])
def test_a_gguf_tensor_of_another_name_is_not_taken_for_a_head(
    name: str, targets: dict[str, Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "gguf_name", lambda one, known=heads.gguf_name: name if "q_proj" in one else known(one))
    with pytest.raises(UserError, match=r"holds no tensor 'layers\.0\.self_attn\.q_proj\.weight'"):
        load(targets, write_head(tmp_path / "head", "gguf"))


def test_a_head_of_another_architecture_is_refused(targets: dict[str, Loaded], tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", "speculators")
    config = json.loads((path / "config.json").read_text())
    config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"trained for a Qwen3ForCausalLM \(Qwen/Qwen3-8B\), .* a LlamaForCausalLM"):
        load(targets, path)


def test_a_torn_file_and_a_pickle_of_more_than_tensors_are_refused(targets: dict[str, Loaded], tmp_path: Path) -> None:
    torn = write_head(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match=r"torn/model.safetensors is not a whole safetensors file"):
        load(targets, torn)
    pickled = write_head(tmp_path / "pickled", "pickled")
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Path("more than a tensor")))
    with pytest.raises(UserError, match=r"pytorch_model.bin is damaged or holds other objects than tensors"):
        load(targets, pickled)
    torch.save({"fc.weight": "text"}, pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is not a state dict"):
        load(targets, pickled)


KINDS = {
    "Domino": {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
    "DFlash2": {"speculators_model_type": "dflash2"},
    "MTP": {"speculators_model_type": "mtp"},
    "EAGLE-4": {"architectures": ["LlamaForCausalLMEagle4"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_by_name(kind: str, targets: dict[str, Loaded], tmp_path: Path) -> None:
    path = heads.write_folder(tmp_path / "head", KINDS[kind], {"fc.weight": np.zeros((2, 2), np.float32)})
    said = (
        "whose licence forbids other implementations"
        if kind == "EAGLE-4"
        else rf"a trained head \({kind}\) that is not supported yet"
    )
    with pytest.raises(UserError, match=said):
        load(targets, path)


def test_an_older_eagle_is_known_by_its_tensors(targets: dict[str, Loaded], tmp_path: Path) -> None:
    config = {name: value for name, value in head_config().items() if name != "draft_vocab_size"}
    config["architectures"] = ["LlamaForCausalLM"]
    path = heads.write_folder(tmp_path / "head", config, {"fc.weight": np.zeros((64, 128), np.float32)})
    with pytest.raises(UserError, match=r"holds no tensor 'layers.0.post_attention_layernorm.weight'"):
        load(targets, path)
    assert head_kind({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30}) is None
    assert head_kind({"dflash_config": [1]}) == "DFlash"


@pytest.mark.parametrize("field", ["top", "nested", "layer_ids"])
def test_taps_are_counted_as_their_field_counts_them(field: str, targets: dict[str, Loaded], tmp_path: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    changes = {
        "top": {key: [1, 4, 7]},
        "nested": {"eagle_config": {key: [0, 3, 6]}},
        "layer_ids": {"eagle_config": {"layer_ids": [1, 4, 7]}},
    }
    model = load(targets, write_head(tmp_path / "head", **changes[field]))
    assert model.spec.taps == (1, 4, 7)
    assert load(targets, write_head(tmp_path / "silent")).spec.taps == heads.TAPS


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_a_file_leaves_out_is_the_targets(runtime: str, targets: dict[str, Loaded], tmp_path: Path) -> None:
    left_out = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    path = write_head(tmp_path / "head", drop=left_out, draft_vocab_size=VOCAB)
    reference = Reference(head_config(), head_tensors(head_config()) | {"d2t": np.zeros(VOCAB, np.int64)})
    table = targets["llama"].model.embedding.numpy()  # the output layer too
    reference.tensors |= {"embed_tokens.weight": table.astype(float), "lm_head.weight": table.astype(float)}
    [found] = tree_logits(load(targets, path, runtime), [0])
    wanted = expected(reference, 0)
    assert distance(found, wanted) < (1e-3 if runtime == "llama" else 0.25 * np.std(wanted))


class TransformersLayer(torch.nn.Module):
    """EAGLE-3's layer from the parts of a transformers decoder layer, whose queries, keys and values get wider."""

    def __init__(self, layer: Any, norms_residual: bool) -> None:
        super().__init__()
        self.norms_residual, self.hidden_norm = norms_residual, copy.deepcopy(layer.input_layernorm)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, torch.nn.Linear(2 * WIDTH, outputs, bias=False))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, position_ids: Any, position_embeddings: Any) -> torch.Tensor:
        embedded, feature = x.chunk(2, -1)
        normed = self.hidden_norm(feature)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        x = (normed if self.norms_residual else feature) + self.self_attn(both, position_embeddings, mask)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


@pytest.mark.parametrize("source", ["transformers", "speculators"])
@pytest.mark.parametrize("variant", ["plain", "qwen3", "normed residual"])
def test_others_own_layers_compute_the_same(variant: str, source: str) -> None:
    """A prompt and a chain of three by a layer of transformers, or by speculators' where it is installed."""
    changes = VARIANTS[variant]
    config, tensors = head_config(**changes), head_tensors(head_config(**changes))
    name = {"llama": "Llama", "qwen3": "Qwen3"}[config["model_type"]]
    left_out = ("architectures", "draft_vocab_size", "model_type", "rope_theta")
    fields = {field: value for field, value in config.items() if field not in left_out}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    theirs = getattr(transformers, f"{name}Config")(**fields, rope_parameters=rope, attn_implementation="eager")
    file = importlib.import_module(f"transformers.models.{config['model_type']}.modeling_{config['model_type']}")
    norms_residual = bool(config.get("norm_before_residual"))
    if source == "speculators":
        modules = pytest.importorskip("speculators.models.eagle3.model_definitions")
        layer = getattr(modules, f"{name}DecoderEagle3FirstLayer")(theirs, 0, norms_residual)
    else:
        layer = TransformersLayer(getattr(file, f"{name}DecoderLayer")(theirs, 0), norms_residual)
    own = {part.removeprefix("midlayer."): value for part, value in tensors.items() if part.startswith("midlayer.")}
    layer.float().load_state_dict({part: torch.from_numpy(value) for part, value in own.items()})
    rotary = getattr(file, f"{name}RotaryEmbedding")(theirs)
    reference, tokens = Reference(config, tensors), tokens_of(PROMPT + 3)
    features = [*torch.from_numpy(reference.fuse(hidden_states().astype(float))).float()]
    with torch.no_grad():
        for end in range(PROMPT, PROMPT + 4):
            embedded = torch.from_numpy(tensors["embed_tokens.weight"])[tokens[:end]]
            x, positions = torch.cat([embedded, torch.stack(features[:end])], -1)[None], torch.arange(end)[None]
            mask = torch.full((end, end), -torch.inf).triu(1)[None, None]
            turns = rotary(x, positions)
            features.append(layer(x, mask, position_ids=positions, position_embeddings=turns)[0][-1])
    _, outputs = reference(hidden_states(), tokens)
    theirs_out = torch.stack(features[PROMPT:]).numpy()
    assert np.abs(theirs_out - outputs[PROMPT - 1 :]).max() < 1e-4
