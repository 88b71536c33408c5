"""The MTP layer of Qwen3.5: the forward against the formulas, the same text, accepted drafts, and kinds of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recurrent
import torch
import transformers
from safetensors.numpy import load_file, save_file
from test_heads import VOCAB, distance, expected, tree_logits
from torch import Tensor
from transformers.models import qwen3_5, qwen3_5_moe, qwen3_next

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.heads.kinds.features import JoinedHead
from outpace.models.load import known_draft, load_draft, load_model
from outpace.models.runtimes import Loaded

FILES = ("folder", "wrapper", "gguf")
RUNTIMES = ("llama", "native")
PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}  # multiples of the kernels' lanes
MODULES: dict[str, tuple[Any, str, str]] = {  # the module of a family, and how its classes' names begin
    "qwen3_5_text": (qwen3_5.modeling_qwen3_5, "Qwen3_5", "Text"),
    "qwen3_5_moe_text": (qwen3_5_moe.modeling_qwen3_5_moe, "Qwen3_5Moe", "Text"),
    "qwen3_next": (qwen3_next.modeling_qwen3_next, "Qwen3Next", ""),
}
MIXTURES = {"moe": ("Qwen3_5Moe", SIZES | recurrent.SHARED), "next": ("Qwen3Next", SIZES | recurrent.SHARED)}
MISTAKES = (
    "feature first",
    "no norm of the target",
    "norms without the one",
    "feedback before the norm",
    "position shifted in the chain",
    "first embedding zeroed",
)
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


class Reference:
    """The layer by transformers' own decoder layer in float64, slot by slot. `mistake`: one of MISTAKES."""

    ids = np.arange(VOCAB)

    def __init__(self, folder: Path, mistake: str = "") -> None:
        fields = json.loads((folder / "config.json").read_text())
        module, family, text = MODULES[fields["model_type"]]
        kind = getattr(transformers, f"{family}{text}Config")
        config = kind(**fields | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
        config._attn_implementation = config._experts_implementation = "eager"
        held = load_file(folder / "model.safetensors")
        self.tensors, self.mistake = {name: torch.from_numpy(one).double() for name, one in held.items()}, mistake
        self.has_sections = bool(text)  # of positions, for images
        self.layer = getattr(module, f"{family}DecoderLayer")(config, 0).double()
        self.rope, start = getattr(module, f"{family}{text}RotaryEmbedding")(config).double(), recurrent.MTP_LAYER
        own = {name.removeprefix(start): one for name, one in self.tensors.items() if name.startswith(start)}
        self.layer.load_state_dict(with_stacked_experts(own))

    @torch.no_grad()
    def __call__(self, hidden: np.ndarray, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        states = torch.from_numpy(hidden[0]).double()
        known = states if self.mistake == "no norm of the target" else self._norm(states, "model.norm", True)
        inputs, outputs = torch.zeros(0, known.shape[1]).double(), known[:0]
        embedding, positions = self.tensors["model.embed_tokens.weight"], torch.arange(len(tokens))
        if self.mistake == "position shifted in the chain":
            positions[len(known) :] += 1
        for slot, token in enumerate(tokens):
            feature = known[slot] if slot < len(known) else outputs[-1]
            embedded = embedding[token] * (slot > 0 or self.mistake != "first embedding zeroed")
            both = [self._norm(embedded, "mtp.pre_fc_norm_embedding"), self._norm(feature, "mtp.pre_fc_norm_hidden")]
            joined = torch.cat(both[::-1] if self.mistake == "feature first" else both)
            inputs = torch.cat([inputs, (self.tensors["mtp.fc.weight"] @ joined)[None]])
            if slot >= len(known) - 1:  # earlier outputs are not read
                outputs = self._forward(inputs, positions[: slot + 1])
                final = self._norm(outputs, "mtp.norm")
                outputs = outputs if self.mistake == "feedback before the norm" else final
        return (final @ self.tensors["lm_head.weight"].T).numpy(), outputs.numpy()

    def _forward(self, inputs: Tensor, positions: Tensor) -> Tensor:
        mask = torch.full((len(inputs), len(inputs)), -torch.inf).double().triu(1)[None, None]
        sections = (3, 1, -1) if self.has_sections else (1, -1)
        factors = self.rope(inputs[None], positions.expand(sections))
        out = self.layer(inputs[None], position_embeddings=factors, attention_mask=mask)
        return (out[0] if isinstance(out, tuple) else out).reshape(inputs.shape)

    def _norm(self, x: Tensor, name: str, is_target: bool = False) -> Tensor:
        one = float(is_target or self.mistake != "norms without the one")
        squares = x.square().mean(-1, keepdim=True)
        return x / torch.sqrt(squares + 1e-6) * (self.tensors[f"{name}.weight"] + one)


def with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's tensors, with the experts' matrices as transformers' modules hold them."""
    start, found = "mlp.experts.", {name: one for name, one in tensors.items() if ".experts." not in name}
    count = len({name.split(".")[2] for name in tensors if name.startswith(start)})

    def stacked(part: str) -> Tensor:
        return torch.stack([tensors[f"{start}{number}.{part}_proj.weight"] for number in range(count)])

    if count:
        found |= {f"{start}gate_up_proj": torch.cat([stacked("gate"), stacked("up")], 1)}
        found |= {f"{start}down_proj": stacked("down")}
    return found


def wrapped(folder: Path, path: Path) -> Path:
    """Write the model as in a checkpoint that holds a vision model too."""
    path.mkdir()
    for file in folder.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    save_file(named | {"model.visual.patch.weight": np.ones((2, 2), np.float32)}, path / "model.safetensors")
    return path


def write(folder: Path, name: str, is_exact: bool = False, model: str = "mtp") -> dict[str, Path]:
    """Write a target with an MTP layer in files of every kind."""
    path = folder / name
    recurrent.make(model, path)
    recurrent.add_mtp(path, is_exact)
    gguf = recurrent.write_gguf(path, folder / f"{name}.gguf", model)
    return {"folder": path, "wrapper": wrapped(path, folder / f"{name}-wrapper"), "gguf": gguf}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("mtp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recurrent.SHAPES, "mtp", ("Qwen3_5", recurrent.QWEN | SIZES))
        return {name: write(folder, name, name == "exact") for name in ("random", "exact")}


def load(path: Path, runtime: str, spec: str = "mtp") -> tuple[Loaded, Loaded]:
    """Load a target and the draft in its files."""
    target = load_model(path, dtype="float32" if runtime == "llama" else "int8")
    return target, load_draft(spec, target, **({} if runtime == "llama" else {"dtype": "int8", "kv_dtype": "float32"}))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_mixtures_of_experts_have_such_layers(
    runtime: str, kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(recurrent.SHAPES, name, (MIXTURES[name][0], recurrent.QWEN | MIXTURES[name][1]))
    found = write(tmp_path, name, model=name)
    if name == "next":  # whose published config.json may not say so
        config = json.loads((found["folder"] / "config.json").read_text())
        del config["mtp_num_hidden_layers"]
        (found["folder"] / "config.json").write_text(json.dumps(config))
    target, head = load(found[kind], runtime, "auto")
    assert head.model.layers.config.experts == target.model.config.experts
    reference = Reference(found["folder"])
    for seed, got in enumerate(tree_logits(head.model, [0, 1])):
        wanted = expected(reference, seed)
        if runtime == "llama":
            assert distance(got, wanted) < 1e-4
        else:  # rows whose router is nearly undecided may choose another expert
            assert np.median(np.abs(got - wanted).max(1)) < 0.3 * np.std(wanted)
    asked = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    with LLM(target, head, method="speculative", profile=False) as llm:
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        drafted = llm.generate([*PROMPTS], **asked)
    assert [one.tokens for one in drafted] == plain
    assert all(one.figures.drafted > 0 for one in drafted)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", FILES)
def test_the_layer_is_that_of_the_formulas(kind: str, runtime: str, paths: dict[str, dict[str, Path]]) -> None:
    _, head = load(paths["random"][kind], runtime)
    assert isinstance(head.model, JoinedHead)
    assert (head.model.spec.kind, head.model.spec.taps, head.drafter) == ("MTP of Qwen3.5", (4,), "eagle")
    reference = Reference(paths["random"]["folder"])
    for seed, found in enumerate(tree_logits(head.model, [0, 1])):
        wanted = expected(reference, seed)
        assert distance(found, wanted) < (1e-4 if runtime == "llama" else 0.3 * np.std(wanted))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_forward_is_far_away(mistake: str, paths: dict[str, dict[str, Path]]) -> None:
    _, head = load(paths["random"]["folder"], "llama")
    reference = Reference(paths["random"]["folder"], mistake)
    assert distance(tree_logits(head.model, [0])[0], expected(reference, 0)) > 0.05


@pytest.mark.parametrize("name", ["random", "exact"])
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_auto_finds_it_and_the_text_is_that_of_plain_decoding(
    runtime: str, kind: str, name: str, paths: dict[str, dict[str, Path]]
) -> None:
    target, head = load(paths[name][kind], runtime, "auto")
    assert known_draft(target) == "mtp"
    asked = {"max_tokens": 30, "temperature": 0.0 if name == "exact" else 0.8, "seed": 5, "ignore_eos": True}
    options = {"draft_length": 3, "width": 1} if name == "exact" else {}
    with LLM(target, head, method="speculative", profile=False, **options) as llm:
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        for _ in range(2):  # the second time, the prefix cache has the prompts
            drafted = llm.generate([*PROMPTS], **asked)
            assert [one.tokens for one in drafted] == plain
            assert all(one.figures.drafted > 0 for one in drafted)
    if name == "exact":
        assert all(one.figures.mean_accepted_length > 3.2 for one in drafted)


def test_a_target_without_it_is_refused_and_drafts_plainly(paths: dict[str, dict[str, Path]], tmp_path: Path) -> None:
    """A copy may have lost the layer. A model with the layer is a draft model like others."""
    whole = paths["random"]["folder"]
    for file in whole.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(whole / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors")
    target = load_model(tmp_path, dtype="float32")
    with pytest.raises(
        UserError, match="has no MTP layer that outpace runs: checkpoints of MiMo-7B, Qwen3-Next and Qwen"
    ):
        load_draft("mtp", target)
    for path in (whole, paths["random"]["gguf"]):
        draft = load_draft(path, target, dtype="float32")
        assert (draft.is_head, draft.drafter, draft.model.num_layers) == (False, "model", 4)


def test_a_layer_of_another_shape_is_refused(paths: dict[str, dict[str, Path]], tmp_path: Path) -> None:
    whole = paths["random"]["folder"]
    for file in whole.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(whole / "model.safetensors")
    changed: dict[str, Any] = {"mtp.fc.weight": np.zeros((64, 64), np.float32)}
    save_file(tensors | changed, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'fc.weight' has shape \[64, 64\], expected \[64, 128\]"):
        load(tmp_path, "llama")
