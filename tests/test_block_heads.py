"""DFlash, DSpark and JetSpec heads: every layout, the forward against the formulas, fields, and trees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import block_heads
import numpy as np
import pytest
import torch
import transformers
from block_heads import BLOCK, JETSPEC, TAPS, VARIANTS, BlockReference, block_config, block_tensors, write_block
from files import model_folder
from heads import LAYERS, VOCAB, WIDTH
from safetensors.torch import load_file
from transformers.models.qwen3 import modeling_qwen3

from outpace.api.llm import LLM
from outpace.core.drafting import UNRESTRICTED
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.tree import TokenTree
from outpace.core.types import Request
from outpace.drafters._model_drafter import ChildAdder, OfferState
from outpace.drafters._tree_expander import ExpansionJob
from outpace.models.heads.kinds.block import BlockDraft
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded
from outpace.rules.greedy import Greedy

RUNTIMES = ("llama", "native")
LENGTHS = (13, 6, 1)  # of the texts of a batch
ANCHOR = 17
OF_DFLASH = block_heads.CONFIG["dflash_config"]
PATHS = ([ANCHOR], [ANCHOR, 200], [ANCHOR, 200, 31])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    path = model_folder(tmp_path_factory.mktemp("block"), "target", num_hidden_layers=LAYERS)
    captured = load_model(path, dtype="float32", graphs="eager")
    return {"llama": load_model(path, dtype="float32"), "native": load_model(path), "captured": captured}


def load(targets: dict[str, Loaded], path: Path, runtime: str = "llama", **options: Any) -> Any:
    given = {"dtype": "int8", "kv_dtype": "float32"} if runtime == "native" else {}
    return load_draft(path, targets[runtime], **(given | options)).model


def hidden_states(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((len(TAPS), count, WIDTH)).astype(np.float32)


def draft(model: Any, lengths: Sequence[int] = LENGTHS) -> BlockDraft:
    """The blocks after texts of these lengths, in one batch; the texts' hidden states come in two pieces."""
    sessions = []
    for length in lengths:
        session, hidden = model.open(100, 60), hidden_states(length)
        for piece in (hidden[:, : length // 2], hidden[:, length // 2 :]):
            session.add_features(model.fuse(piece if model.device == "cpu" else torch.from_numpy(piece)))
            if len(piece[0]) > 5:
                model.read_features([session])
        sessions.append(session)
    return model.draft(sessions, [ANCHOR] * len(sessions))


def rows_of(found: BlockDraft, count: int = BLOCK - 1, lengths: Sequence[int] = LENGTHS) -> np.ndarray:
    """All logits without a Markov bias: [texts, places, vocab]."""
    return np.array(
        [
            [np.asarray(found.layer(n, depth, [[ANCHOR]]).to_dense())[0] for depth in range(count)]
            for n in range(len(lengths))
        ]
    )


def wide(reference: BlockReference, rows: np.ndarray) -> np.ndarray:
    found = np.full((*rows.shape[:-1], VOCAB), -np.inf)
    found[..., reference.ids] = rows
    return found


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    same = np.isneginf(found) & np.isneginf(wanted)
    with np.errstate(invalid="ignore"):
        return float(np.where(same, 0.0, np.abs(found - wanted)).max())


def reference_of(changes: dict[str, Any], mistake: str = "") -> BlockReference:
    config = block_config(**changes)
    return BlockReference(config, block_tensors(config), mistake)


def expected(reference: BlockReference) -> np.ndarray:
    return wide(reference, np.array([reference.logits(hidden_states(length), ANCHOR) for length in LENGTHS]))


def is_dspark(variant: str) -> bool:
    return variant.startswith("dspark")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if is_dspark(name)])
def test_rows_depend_on_the_token_before(
    variant: str, runtime: str, targets: dict[str, Loaded], tmp_path: Path
) -> None:
    """DSpark's logits and confidences below paths; only the best tokens before the bias are kept."""
    reference, near = reference_of(VARIANTS[variant]), {"llama": 1e-4, "native": 2.0}[runtime]
    found = draft(load(targets, write_block(tmp_path / "head", **VARIANTS[variant]), runtime))
    for number, length in enumerate(LENGTHS):
        base = reference.logits(hidden_states(length), ANCHOR)
        for depth, path in enumerate(PATHS):
            below, confidence = reference.below(hidden_states(length), path)
            held = found.layer(number, depth, [path, path])
            values, ids = np.asarray(held.values), held.ids
            assert ids is not None
            assert len(ids) == 64
            places = np.searchsorted(reference.ids, ids)
            assert np.abs(values - below[places]).max() < near
            if runtime == "llama":
                assert set(places) == set(np.argsort(-base[depth])[:64])
            log = found.log_confidence(number, path)
            assert log is not None
            assert abs(np.exp(log) - confidence) < (1e-5 if runtime == "llama" else 0.1)
    wrong = reference_of(VARIANTS[variant], "the bias of the anchor").below(hidden_states(13), PATHS[1])[0]
    assert np.abs(wrong - reference.below(hidden_states(13), PATHS[1])[0]).max() > 0.1 or "recurrent" in variant


@pytest.mark.parametrize("layout", block_heads.LAYOUTS)
@pytest.mark.parametrize("variant", ["dflash", "reduced vocabulary", "dspark"])
def test_every_layout_gives_the_same_scores(
    layout: str, variant: str, targets: dict[str, Loaded], tmp_path: Path
) -> None:
    changes = VARIANTS[variant]
    one = draft(load(targets, write_block(tmp_path / "one", **changes)))
    other = draft(load(targets, write_block(tmp_path / "other", layout, **changes)))
    assert np.array_equal(rows_of(one), rows_of(other))
    assert one.log_confidence(0, [ANCHOR, 3]) == other.log_confidence(0, [ANCHOR, 3])


@pytest.mark.parametrize(
    ("from_anchor", "changes", "options"),
    [
        (False, {}, {"dtype": "float32"}),
        (False, {"dspark_bonus_anchor": True, "mystery": 1}, {"dtype": "int8"}),
        (True, {"sample_from_anchor": True}, {"dtype": "int8"}),
        (True, {"query_zero_predicts_next": True}, {"dtype": "float32", "graphs": "eager"}),
        (True, {"dflash_config": OF_DFLASH | {"query_zero_predicts_next": True}}, {"dtype": "int8"}),
    ],
    ids=str,
)
def test_a_block_that_is_right_by_construction_is_accepted(
    from_anchor: bool, changes: dict[str, Any], options: dict[str, str], tmp_path: Path
) -> None:
    """In either layout; of a head that is read one position off, nothing is."""
    path, head = block_heads.exact_block(tmp_path / "right", from_anchor, **changes)
    _, shifted = block_heads.exact_block(tmp_path / "shifted", not from_anchor, **changes)
    target = load_model(path, **options)
    for draft, is_right in ((head, True), (shifted, False)):
        loaded = load_draft(draft, target)
        with LLM(target, loaded, method="speculative", profile=False, draft_length=3, width=1) as llm:
            asked = {"max_tokens": 20, "ignore_eos": True}
            [plain], [drafted] = (llm.generate([[*range(9)]], plain=plain, **asked) for plain in (True, False))
            named = f"{draft}: unknown fields of the head were ignored: mystery"
            assert llm.notices == ([named] if "mystery" in changes else [])
        assert drafted.tokens == plain.tokens
        assert drafted.figures.drafted > 0
        assert drafted.figures.accepted == (drafted.figures.drafted if is_right else 0)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_batch_and_a_copied_prefix_give_the_same_blocks(
    runtime: str, targets: dict[str, Loaded], tmp_path: Path
) -> None:
    model = load(targets, write_block(tmp_path / "head"), runtime)
    together = rows_of(draft(model))
    for number, length in enumerate(LENGTHS):
        alone = rows_of(draft(model, [length]), lengths=[length])[0]
        assert distance(together[number], alone) < (1e-5 if runtime == "llama" else 1e-30)
    hidden, whole, copied = hidden_states(13), model.open(100, 60), model.open(100, 60)
    as_given = (lambda rows: rows) if runtime == "native" else torch.from_numpy
    whole.add_features(model.fuse(as_given(hidden[:, :9])))
    model.read_features([whole])
    model.draft([whole], [3])
    copied.start_from(whole, 7)
    copied.add_features(model.fuse(as_given(hidden[:, 7:])))
    assert distance(rows_of(model.draft([copied], [ANCHOR]), lengths=[13])[0], together[0]) < 1e-5


OF_MUSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
OF_MUSE += ("head_dim", "rms_norm_eps", "max_position_embeddings", "block_size")


def test_layers_without_ids_are_spread_evenly(targets: dict[str, Loaded], tmp_path: Path) -> None:
    config = block_config(dflash_config={"mask_token_id": 1}, num_hidden_layers=3)
    path = block_heads.write_folder(tmp_path / "head", config, block_tensors(config))
    assert load(targets, path).spec.taps == (2, 4, 6)  # layers 1, 3 and 5, counted from 0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_a_file_leaves_out_is_the_targets(runtime: str, targets: dict[str, Loaded], tmp_path: Path) -> None:
    config, tensors = block_config(), block_tensors(block_config())
    left_out = ("embed_tokens.weight", "lm_head.weight")
    path = block_heads.write_folder(
        tmp_path / "head", config, {name: value for name, value in tensors.items() if name not in left_out}
    )
    table = targets["llama"].model.embedding.numpy().astype(float)  # the output layer too
    reference = BlockReference(config, tensors | dict.fromkeys(left_out, table))
    wanted = expected(reference)
    found = rows_of(draft(load(targets, path, runtime)))
    assert distance(found, wanted) < (1e-4 if runtime == "llama" else 0.35 * np.std(wanted))


def test_transformers_own_model_computes_the_same(targets: dict[str, Loaded], tmp_path: Path) -> None:
    """DFlash by transformers' module for Muse Glimmer, from the same file and in two rounds of growing text."""
    modeling = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers.cache_utils import DFlashCache

    config, path = block_config(), write_block(tmp_path / "head", "encoder")
    tensors = load_file(path / "model.safetensors")
    embedding, output = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    theirs = modeling.MuseGlimmerAssistantConfig(
        **{name: value for name, value in config.items() if name in OF_MUSE},
        **config["dflash_config"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        layer_types=["full_attention"] * config["num_hidden_layers"],
        attn_implementation="eager",
    )
    model = modeling.MuseGlimmerAssistantModel(theirs)
    model.load_state_dict(tensors)
    block, cache = embedding[[ANCHOR, *[block_heads.MASK] * (BLOCK - 1)]][None], DFlashCache(config=theirs)
    ours, hidden = load(targets, path), hidden_states(13)
    session = ours.open(100, 60)
    for piece in (hidden[:, :9], hidden[:, 9:]):
        cache.set_previous_accepted_tokens(piece.shape[1])
        with torch.no_grad():
            joined = torch.from_numpy(piece).permute(1, 0, 2).flatten(1)[None]
            wanted = model(block, joined, past_key_values=cache).last_hidden_state[0] @ output.T
        cache.crop(-BLOCK)
        session.add_features(ours.fuse(torch.from_numpy(piece)))
        found = rows_of(ours.draft([session], [ANCHOR]), lengths=[1])[0]
        assert distance(found, wanted[1:].numpy()) < 1e-4


@pytest.mark.parametrize("variant", ["dflash", "sliding", "dspark", "dspark, gated", "dspark, recurrent"])
def test_speculators_own_modules_compute_the_same(variant: str) -> None:
    """The outputs of a block, and DSpark's bias, by the modules that speculators trains, where it is installed."""
    layers = pytest.importorskip("speculators.models.dflash.model_definitions")
    dspark = pytest.importorskip("speculators.models.dspark.model_definitions")
    config, reference = block_config(**VARIANTS[variant]), reference_of(VARIANTS[variant])
    left_out = ("architectures", "model_type", "rope_theta", "block_size", "dflash_config", "draft_vocab_size")
    fields = {name: value for name, value in config.items() if name not in left_out and "markov" not in name}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    theirs = transformers.Qwen3Config(**fields, rope_parameters=rope, attn_implementation="eager")
    tensors = {name: torch.from_numpy(value) for name, value in block_tensors(config).items()}
    hidden, known = hidden_states(13), 13
    joined = torch.from_numpy(hidden).permute(1, 0, 2).flatten(1)
    norm = modeling_qwen3.Qwen3RMSNorm(WIDTH, eps=config["rms_norm_eps"])
    norm.load_state_dict({"weight": tensors["hidden_norm.weight"]})
    with torch.no_grad():
        features = norm(joined @ tensors["fc.weight"].T)[None]
        x = tensors["embed_tokens.weight"][[ANCHOR, *[block_heads.MASK] * (BLOCK - 1)]][None]
        places = torch.arange(known + BLOCK)[None]
        turns = modeling_qwen3.Qwen3RotaryEmbedding(theirs)(x, places)
        for number in range(config["num_hidden_layers"]):
            layer = layers.Qwen3DFlashDecoderLayer(theirs, number)
            prefix = f"layers.{number}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            layer.load_state_dict(own)
            mask = torch.from_numpy(reference._mask(number, known, BLOCK)).float()[None, None]
            x = layer(features, x, mask, position_embeddings=turns)
        norm.load_state_dict({"weight": tensors["norm.weight"]})
        outputs = norm(x)
    assert np.abs(outputs[0].numpy() - reference.outputs(hidden, ANCHOR)).max() < 1e-4
    if not is_dspark(variant):
        return
    kind, rows = config.get("markov_head_type", "vanilla"), config["draft_vocab_size"]
    markov = dspark.MarkovHead(
        verifier_vocab_size=VOCAB,
        draft_vocab_size=rows,
        markov_rank=block_heads.RANK,
        hidden_size=WIDTH,
        head_type=kind,
    )
    markov.load_state_dict(
        {name.removeprefix("markov_head."): value for name, value in tensors.items() if name.startswith("markov_head.")}
    )
    path = [ANCHOR, 200, 31, 5]
    before = torch.tensor([path if reference.from_anchor else [ANCHOR, *path]])[:, :BLOCK]
    with torch.no_grad():
        bias = markov.block_bias(prev_token_ids=before, hidden_states=outputs[:, : before.shape[1]])[0, -1].numpy()
    last = path[: before.shape[1] - (not reference.from_anchor)]
    slot = before.shape[1] - 1
    base = reference.outputs(hidden, ANCHOR)[slot] @ tensors["lm_head.weight"].numpy().T
    assert np.abs(base + bias - reference.below(hidden, last)[0]).max() < 1e-3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(model_folder(tmp_path_factory.mktemp("jetspec"), "target", num_hidden_layers=LAYERS))


@pytest.mark.parametrize(
    ("changes", "causal", "block"),
    [
        ({"dflash_config": JETSPEC}, True, BLOCK),
        ({"dflash_config": JETSPEC | {"draft_shift": True}}, True, BLOCK - 1),
        ({"dflash_config": JETSPEC | {"causal_head": False}}, False, BLOCK),
        ({"architectures": ["JetSpecDraftModel"]}, True, BLOCK),
    ],
)
def test_a_head_is_known_by_its_field_or_its_name(
    changes: dict[str, Any], causal: bool, block: int, target: Loaded, tmp_path: Path
) -> None:
    head = load_draft(write_block(tmp_path / "head", **changes), target, dtype="int8")
    spec = head.model.spec
    assert (spec.kind, head.drafter, spec.causal, spec.block) == ("jetspec", "block", (causal, causal), block)
    assert spec.num_drafted == BLOCK - 1


def test_contradictions_are_refused(target: Loaded, tmp_path: Path) -> None:
    path = write_block(tmp_path / "head", dflash_config=JETSPEC, causal_head=False)
    with pytest.raises(UserError, match=r"causal_head is False, but dflash_config\.causal_head is True"):
        load_draft(path, target)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_tree_has_the_best_paths(width: int) -> None:
    """Expanding the best node each time gives the same as picking from the product of all slots, and no level has to be
    wide."""
    random, vocab, depths = np.random.default_rng(width), 6, 4
    log_q = np.log(random.dirichlet(np.ones(vocab) * 0.3, depths))
    state = OfferState(Request((1, 2), Greedy(), 20))
    state.directives = UNRESTRICTED
    tree = TokenTree(2)

    def logits_of(job: int, depth: int, nodes: Any) -> SparseLogits:
        return SparseLogits(log_q[[depth] * len(nodes)].astype(np.float32), None, vocab)

    ChildAdder(width, 256, "1").add_best_first([ExpansionJob(state, tree, [0])], depths, logits_of)
    parents = sorted(set(tree.parents[1:]))
    assert len(parents) == depths * width
    expanded = {tuple(tree.path_tokens(node)) for node in parents}
    every = [path for length in range(depths) for path in itertools.product(range(vocab), repeat=length)]
    scores = {path: sum(log_q[slot, token] for slot, token in enumerate(path)) for path in every}
    offered = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
    best = sorted((path for path in every if path in offered), key=lambda path: -scores[path])[: depths * width]
    assert expanded == set(best)
