"""Models with recurrent layers: logits against transformers, files of both kinds, and exact token trees."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recurrent
import torch
import transformers
from files import write_gguf
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recurrent import Pair, pairs_of, read
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Capability, Part, chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf.source import GgufCheckpoint, convert
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.config.recurrence import USUAL_NODES
from outpace.models.llama.torch import recurrent as runtime_layers
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model

TEXT = [int(token) for token in torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(5))]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return pairs_of(tmp_path_factory)


def one_by_one(model: Llama, text: list[int]) -> Tensor:
    session = model.open(len(text) + 1, 4)
    rows = [model.score([chain(session, [token], [0], [0] if at else [])]) for at, token in enumerate(text)]
    return torch.cat(rows)


def in_parts(model: Llama, text: list[int], sizes: tuple[int, ...]) -> Tensor:
    session, kept, rows, start = model.open(len(text), 150), 0, [], 0
    for count in sizes:
        rows.append(model.score([chain(session, text[start : start + count], range(count), range(kept))]))
        start, kept = start + count, count
    return torch.cat(rows)


@pytest.mark.parametrize("name", recurrent.SHAPES)
def test_logits_are_those_of_transformers(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    with torch.no_grad():
        expected = pair.reference(torch.tensor([TEXT])).logits[0]
    got = pair.model.score([chain(pair.model.open(100, 100), TEXT, range(len(TEXT)))])
    assert expected.std() > 0.5
    torch.testing.assert_close(got[:23], expected[:23], atol=1e-4, rtol=0)
    torch.testing.assert_close(
        got, expected, atol=1e-3, rtol=0
    )  # float32 is up to 4e-4 off float64 here, in transformers too
    half = read(Checkpoint.open(pair.folder), dtype=torch.bfloat16)
    close = half.score([chain(half.open(100, 100), TEXT, range(len(TEXT)))])
    assert (close.float() - expected)[:23].abs().mean() < 0.1


@pytest.mark.parametrize("name", recurrent.SHAPES)
def test_a_gguf_file_gives_the_same_logits(pairs: Callable[[str], Pair], name: str, tmp_path: Path) -> None:
    pair = pairs(name)
    file = recurrent.write_gguf(pair.folder, tmp_path / "model.gguf", name, is_old=True)
    source, folder = GgufCheckpoint(file), Checkpoint.open(pair.folder)
    assert source.names() == folder.names()
    assert {one: source.shape(one) for one in source.names()} == {one: folder.shape(one) for one in source.names()}
    model = load_model(file, runtime="llama").model
    got, expected = (one.score([chain(one.open(100, 100), TEXT, range(len(TEXT)))]) for one in (model, pair.model))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    sizes = model.config.recurrence
    is_reordered = sizes.value_heads != sizes.key_heads and name != "next"
    assert sizes.is_tiled == is_reordered


def test_a_checkpoint_with_a_vision_model_gives_the_language_models_logits(tmp_path: Path) -> None:
    """LFM2-VL; the vision model is ignored with a notice."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Lfm2VlConfig(
        text_config=recurrent.LFM | {"model_type": "lfm2"}, vision_config=vision | {"patch_size": 4, "num_patches": 16}
    )
    torch.manual_seed(0)
    model = transformers.Lfm2VlForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "language_model" in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        expected = model(input_ids=torch.tensor([TEXT])).logits[0]
    model.save_pretrained(tmp_path)
    loaded = load_model(recurrent.with_tokenizer(tmp_path), dtype="float32")
    got = loaded.model.score([chain(loaded.model.open(100, 100), TEXT, range(len(TEXT)))])
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert loaded.notice is not None
    assert "tensors of other models in the files were ignored: multi_modal_projector, vision_tower" in loaded.notice


LLAMA_CPP = [
    name for name in recurrent.SHAPES if name not in ("wide", "next")
]  # it lacks such heads, and needs experts


@pytest.mark.parametrize(("name", "has_mtp"), [*((name, False) for name in LLAMA_CPP), ("grouped", True)])
def test_llama_cpp_computes_the_same(name: str, has_mtp: bool, tmp_path: Path) -> None:
    """Logits of a text, whose last tokens llama.cpp reads one by one; it ignores a layer for multi-token prediction."""
    llama_cpp = pytest.importorskip("llama_cpp")
    recurrent.make(name, tmp_path)
    if has_mtp:
        recurrent.add_mtp(tmp_path)
    file = recurrent.write_gguf(tmp_path, tmp_path / "model.gguf", name)
    sizes = {"n_ctx": 128, "n_batch": 128, "n_ubatch": 128, "n_threads": 1, "n_threads_batch": 1}
    theirs = llama_cpp.Llama(str(file), **sizes, type_k=0, type_v=0, flash_attn=False, logits_all=True, verbose=False)
    for part in (TEXT[:50], *([token] for token in TEXT[50:])):
        theirs.eval(part)
    expected = torch.from_numpy(theirs.scores[: len(TEXT)].copy())
    theirs.close()
    model = load_model(file, runtime="llama").model
    got = model.score([chain(model.open(100, 100), TEXT, range(len(TEXT)))])
    assert got.std() > 0.5
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=0)
    assert torch.equal(got.argmax(1), expected.argmax(1))


def test_matrices_may_be_fused_or_not(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = pairs("next")
    file = recurrent.write_gguf(pair.folder, tmp_path / "model.gguf", "next")
    assert {"qkv", "z", "ba"} <= {name.rpartition("in_proj_")[2][:-7] for name in GgufCheckpoint(file).names()}
    models = [load_model(file, runtime="llama").model, read(Checkpoint.open(convert(file, tmp_path / "cache")))]
    for model in (*models, pair.model):
        got = model.score([chain(model.open(100, 100), TEXT, range(len(TEXT)))])
        torch.testing.assert_close(
            got, pair.model.score([chain(pair.model.open(100, 100), TEXT, range(len(TEXT)))]), atol=1e-4, rtol=0
        )
    with pytest.raises(UserError, match="inputs are in another order than transformers expects"):
        load_model(file, runtime="transformers")


@pytest.mark.parametrize("name", recurrent.MODELS)
def test_prompts_in_any_chunks_give_the_bits_of_single_tokens(pairs: Callable[[str], Pair], name: str) -> None:
    model = pairs(name).model
    expected = one_by_one(model, TEXT)
    assert model.exact
    for sizes in ((70,), (1, 2, 67), (33, 4, 33)):
        assert torch.equal(in_parts(model, TEXT, sizes), expected)


def near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got[:64], expected[:64], atol=1e-4, rtol=0)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)  # as of transformers


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the lengths of chains that are computed by products, in reading and in folding."""
    lengths: list[int] = []
    for name, place in (("_read_chain", 1), ("advanced_by_chain", 2)):
        compute = getattr(runtime_layers, name)

        def note(*given: Tensor, compute: Any = compute, place: int = place) -> Any:
            lengths.append(given[place].shape[-3])
            return compute(*given)

        monkeypatch.setattr(runtime_layers, name, note)
    return lengths


@pytest.mark.parametrize("sizes", [(140,), (50, 64, 26), (16, 15, 109), (1, 64, 64, 11)], ids=str)
@pytest.mark.parametrize("name", ["equal", "grouped", "wide", "next"])
def test_chains_of_prompts_are_computed_by_products_without_exact_mode(
    pairs: Callable[[str], Pair], chains: list[int], name: str, sizes: tuple[int, ...]
) -> None:
    """All logits and the state after the text are those of the exact walk, which has no products."""
    model, exact = read(Checkpoint.open(pairs(name).folder), exact=False), pairs(name).model
    text = TEXT * 2
    expected = in_parts(exact, [*text, 7], (*sizes, 1))
    assert not chains
    near(in_parts(model, [*text, 7], (*sizes, 1)), expected)
    assert {*chains} <= {*sizes, 64, *(size % 64 for size in sizes)}
    assert min(chains) >= min(12, runtime_layers.MIN_CHAIN)
    assert max(chains) == max(sizes)  # a fold is one product


def test_a_part_of_a_chain_may_be_kept(pairs: Callable[[str], Pair], chains: list[int]) -> None:
    """The stash of a chain folds in parts, into the state that the walk of the same nodes would leave."""
    model, exact = read(Checkpoint.open(pairs("grouped").folder), exact=False), pairs("grouped").model
    for kept in (0, 5, 15, 16, 40):
        session = model.open(100, 100)
        model.score([chain(session, TEXT[:60])])
        session.keep(range(kept), range(kept, 60) if kept == 40 else ())
        text = TEXT[:60] if kept == 40 else TEXT[:kept]
        part = Part(session, [7, 8], [19, 20], [0, 1]) if kept == 40 else chain(session, [7, 8], [0, 1])
        near(model.score([part]), in_parts(exact, [*text, 7, 8], (len(text) + 2,))[-2:])
    assert {60, 40, 16} == {*chains}


def test_trees_are_walked_beside_chains(pairs: Callable[[str], Pair], chains: list[int]) -> None:
    """A pass of a prompt, of a tree as large, and of late nodes, the last at the depth of a chain as long."""
    model, exact = read(Checkpoint.open(pairs("grouped").folder), exact=False), pairs("grouped").model
    prompt, tree, late = (model.open(100, 100) for _ in range(3))
    model.score([chain(late, TEXT[:10]), chain(tree, TEXT[:3])])
    assert not chains
    parents = [PREFIX, *range(18), PREFIX]  # a branch of 19 nodes, and a node next to it
    parts = [
        Part(tree, TEXT[3:23], parents, range(20), range(3)),
        chain(prompt, TEXT[:20], range(20)),
        Part(late, TEXT[10:30], [PREFIX] * 10 + [9, *range(20, 29)], range(20)),
    ]
    got = model.score(parts)
    assert chains == [20] * 3  # of the prompt, in three layers
    whole = in_parts(exact, TEXT[:30], (30,))
    near(got[:19], whole[3:22])
    near(got[19:20], in_parts(exact, [*TEXT[:3], TEXT[22]], (4,))[-1:])
    near(got[20:40], whole[:20])
    near(got[40:50], torch.cat([in_parts(exact, [token], (1,)) for token in TEXT[10:20]]))
    near(got[50:], in_parts(exact, TEXT[:10] + TEXT[20:30], (20,))[10:])


class Trees(RuleBasedStateMachine):
    """Two sessions whose trees grow at random, whose nodes are kept at random, and whose logits are compared with those
    of the same branch read token by token."""

    model: Llama

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sessions = [self.model.open(60, 40) for _ in range(2)]
        self.texts: list[list[int]] = [[], []]
        self.nodes: list[list[tuple[int, int]]] = [[], []]  # token and parent of each pending node
        self.kept: list[list[int] | None] = [None, None]

    def branch(self, number: int, node: int) -> list[int]:
        tokens: list[int] = []
        while node != PREFIX:
            token, node = self.nodes[number][node]
            tokens.insert(0, token)
        return tokens

    def part(self, number: int, count: int) -> Part:
        keep, nodes = self.kept[number], self.nodes[number]
        if keep is not None:  # of the last round, which the pass applies
            self.texts[number] += [nodes[node][0] for node in keep]
            nodes.clear()
        before = len(nodes)
        for _ in range(count):
            nodes.append((self.random.randrange(3, 259), self.random.randrange(PREFIX, len(nodes))))
        added = nodes[before:]
        self.kept[number] = None
        parents = [parent for _, parent in added]
        return Part(self.sessions[number], [token for token, _ in added], parents, range(count), keep)

    @rule(
        counts=st.lists(st.integers(1, 6), min_size=2, max_size=2), which=st.sampled_from([(0,), (1,), (0, 1), (1, 0)])
    )
    def grow(self, counts: list[int], which: tuple[int, ...]) -> None:
        which = tuple(number for number in which if self.sessions[number].free - 12 > counts[number])
        parts = [self.part(number, counts[number]) for number in which]
        if not parts:
            return
        rows = iter(self.model.score(parts))
        for number, part in zip(which, parts, strict=True):
            first = len(self.nodes[number]) - len(part.tokens)
            for node in range(first, first + len(part.tokens)):
                text = self.texts[number] + self.branch(number, node)
                assert torch.equal(next(rows), one_by_one(self.model, text)[-1])

    def may_keep(self, number: int) -> bool:
        """Grow a small tree if there is none, and return whether a path of it may be kept."""
        if len(self.nodes[number]) < 4 or self.kept[number] is not None:
            self.grow([4, 4], (number,))
        held = len(self.texts[number]) + len(self.nodes[number])
        return self.kept[number] is None and len(self.nodes[number]) > 3 and held < 40

    @rule(number=st.integers(0, 1))
    def accept(self, number: int) -> None:
        """Keep the path to some node, or nothing, with the next pass."""
        if self.may_keep(number):
            self.kept[number] = self.path_to(number, self.random.randrange(PREFIX, len(self.nodes[number])))

    @rule(number=st.integers(0, 1))
    def keep_now(self, number: int) -> None:
        """Keep a path at once, with some of the nodes below it as pending nodes."""
        if not self.may_keep(number):
            return
        nodes = self.nodes[number]
        last = self.random.randrange(PREFIX, len(nodes) - 1)
        path = self.path_to(number, last)
        live = list[int]()
        for node, (_, parent) in enumerate(nodes):
            if node > last and (parent == last or parent in live) and self.random.random() < 0.7:
                live.append(node)
        self.texts[number] += self.branch(number, last)
        places = {node: place for place, node in enumerate(live)}
        self.nodes[number] = [(nodes[node][0], places.get(nodes[node][1], PREFIX)) for node in live]
        self.sessions[number].keep(path, live)
        self.grow([3, 3], (number,))

    @rule(number=st.integers(0, 1))
    def copy(self, number: int) -> None:
        """Go on in a copy of the committed text, from a snapshot."""
        session = self.sessions[number]
        session.take_snapshot()
        other = self.model.open(60, 40)
        if self.random.random() < 0.5:
            cut = session.cut_below(self.random.randrange(session.length + 1))
        else:
            cut = session.length
        other.start_from(session, cut)
        self.sessions[number], self.nodes[number], self.kept[number] = other, [], None
        self.texts[number] = self.texts[number][:cut]

    @rule(number=st.integers(0, 1))
    def truncate(self, number: int) -> None:
        session = self.sessions[number]
        cut = session.cut_below(self.random.randrange(session.length + 1))
        session.truncate(cut)
        self.texts[number], self.nodes[number], self.kept[number] = self.texts[number][:cut], [], None

    def path_to(self, number: int, node: int) -> list[int]:
        path: list[int] = []
        while node != PREFIX:
            path.insert(0, node)
            node = self.nodes[number][node][1]
        return path

    @invariant()
    def lengths_agree(self) -> None:
        for session, text in zip(getattr(self, "sessions", ()), getattr(self, "texts", ()), strict=True):
            assert session.length == len(text)


@pytest.mark.parametrize("name", ["grouped", "lfm2"])
def test_any_tree_gives_the_bits_of_its_branches(pairs: Callable[[str], Pair], name: str) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    class Machine(Trees):
        model = pairs(name).model

    run_state_machine_as_test(Machine, settings=settings(max_examples=20, stateful_step_count=8, deadline=None))


def test_a_state_is_cut_only_where_a_snapshot_is(pairs: Callable[[str], Pair]) -> None:
    model = pairs("grouped").model
    session = model.open(60, 60)
    model.score([chain(session, TEXT[:20])])
    session.keep(range(20))
    session.take_snapshot()
    model.score([chain(session, TEXT[20:30])])
    session.keep(range(10))
    assert [session.cut_below(length) for length in (0, 19, 20, 29, 30)] == [0, 0, 20, 20, 30]
    with pytest.raises(ValueError, match="cannot truncate 30 tokens to 25"):
        session.truncate(25)
    with pytest.raises(ValueError, match="has no state there"):
        model.open(60, 10).start_from(session, 25)
    other = model.open(60, 10)
    other.start_from(session, 20)
    session.truncate(20)
    for one in (session, other):
        assert torch.equal(model.score([chain(one, TEXT[20:25], range(5))]), one_by_one(model, TEXT[:25])[20:])


def test_the_stash_of_a_prompt_is_bounded_and_freed(pairs: Callable[[str], Pair]) -> None:
    """Kept nodes leave the stash before new ones come, and a session then takes what is counted as its memory."""
    model = pairs("grouped").model
    session, count = model.open(250, 100), model.chunk
    for start in range(0, 200, count):
        part = (TEXT * 3)[:200][start : start + count]
        model.score([chain(session, part, [], range(session.pending))])
        assert len(part) <= session.memory.stash.shape[1] <= count
    session.keep(range(session.pending))
    model.score([chain(session, TEXT[:3])])
    memory = session.memory
    held = sum(part.nbytes for part in (memory.heads, memory.history, memory.stash, *session.kv))
    assert memory.stash.shape[1] <= USUAL_NODES < count
    assert held <= model.session_bytes(session.slots)
    session.keep([0])
    session.trim()
    assert not memory.stash.shape[1]


def test_recurrent_layers_store_no_keys_and_values(pairs: Callable[[str], Pair]) -> None:
    model = pairs("grouped").model
    session = model.open(60, 10)
    session.reserve(40)
    held = sum(layer.nbytes for layer in session.kv)
    assert held == session.slots * model.token_bytes == session.slots * 2 * 2 * 16 * 8  # one layer of four
    with pytest.raises(UserError, match="a model with recurrent layers cannot score after a prefix"):
        model.check_capability(Capability.LENGTH)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5, it must be a multiple of linear_num_key_heads 2"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries, it must have one for each of 4 layers"),
        (
            {"layer_types": ["linear_attention"] * 4, "full_attention_interval": 4},
            "layer_types contradicts full_attention_interval 4: layer 3 is linear_attention",
        ),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, it must be a whole number of at least 1"),
        ({"model_type": "qwen4_exp", "architectures": None}, "qwen4_exp: it has hyper-connections"),
        ({"model_type": "lfm3", "architectures": None}, "lfm3: its layers have windows"),
        ({"model_type": "gemma3n_text", "architectures": None}, "gemma3n_text: its layers have several residual"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(changes: dict[str, Any], words: str) -> None:
    given = recurrent.QWEN | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    with pytest.raises(UserError, match=words):
        from_dict(given | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"full_attn_idxs": [1, 2]}, r"layer_types contradicts full_attn_idxs \[1, 2\]: layer 2 is conv"),
        ({"conv_dim": 32}, "conv_dim is 32, it must be hidden_size 64"),
    ],
)
def test_configs_of_lfm2_that_contradict_themselves_are_refused(changes: dict[str, Any], words: str) -> None:
    given = recurrent.LFM | {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}
    with pytest.raises(UserError, match=words):
        from_dict(given | changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("grouped", {"linear_num_value_heads": 6}, r"in_proj_qkv.weight' has shape \[64, 64\], .*_value_heads 6"),
        ("grouped", {"linear_conv_kernel_dim": 5}, r"shape \[64, 1, 4\], expected \[64, 1, 5\] .*conv_kernel_dim 5"),
        ("lfm2", {"conv_L_cache": 4}, r"shape \[64, 1, 3\], expected \[64, 1, 4\] .*conv_L_cache 4"),
        ("lfm2", {"layer_types": ["conv"] * 4}, r"layers.1.conv.in_proj.*, which a model with layer_types\[1\] 'conv'"),
        (
            "grouped",
            {"layer_types": None, "full_attention_interval": 2},
            "layers.1.self_attn.q_proj.weight', which a model with full_attention_interval 2 has",
        ),
    ],
)
def test_configs_that_contradict_the_tensors_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    for file in pairs(name).folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("grouped", {"ssm.conv_kernel": 5}, r"shape \[64, 4\], expected \[64, 5\] .*ssm.conv_kernel 5"),
        ("grouped", {"ssm.group_count": 1}, r"has shape .64, 4., expected .48, 4. .*ssm.group_count 1"),
        ("grouped", {"full_attention_interval": 0}, "full_attention_interval is 0, it must be a whole number above 0"),
        ("grouped", {"full_attention_interval": 2}, r"'blk.1.*with attention in layer 1 \(full_attention_inter"),
        (
            "grouped",
            {"attention.recurrent_layers": [True, False]},
            "attention.recurrent_layers has 2 entries, it must have one for each of 4 layers",
        ),
        ("lfm2", {"shortconv.l_cache": 4}, r"shape \[64, 3\], expected \[64, 4\] .*shortconv.l_cache 4"),
        (
            "lfm2",
            {"attention.head_count_kv": [0, 0, 0, 2]},
            r"'blk.1.attn_.*a recurrence in layer 1 \(attention.head_count_kv \[0, 0, 0, 2\]\)",
        ),
    ],
)
def test_gguf_files_that_contradict_their_tensors_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    file = recurrent.write_gguf(pairs(name).folder, tmp_path / "a.gguf", name, **changes)
    with pytest.raises(UserError, match=words):
        GgufCheckpoint(file)


@pytest.mark.parametrize("name", ["qwen4exp", "lfm3", "gemma3n"])
def test_gguf_files_of_related_architectures_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", architecture=name)
    with pytest.raises(
        UserError, match=rf"a.gguf has the architecture '{name}', which is not supported: its? \w+ "
    ) as found:
        load_model(file)
    assert str(found.value).count(name) == 1


def test_the_last_layer_is_no_layer_for_more_tokens(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    file = recurrent.write_gguf(pairs("equal").folder, tmp_path / "a.gguf", "equal", nextn_predict_layers=1)
    with pytest.raises(
        UserError, match=r"nextn_predict_layers is 1, so the block 3 must have a tensor 'nextn\.eh_proj"
    ):
        GgufCheckpoint(file)


@pytest.fixture(scope="module")
def files(pairs: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    return {
        name: str(recurrent.write_gguf(pairs(name).folder, folder / f"{name}.gguf", name))
        for name in ("grouped", "equal", "next", "lfm2")
    }


PROMPTS = ["hello world hello world hello", "12 hello 12 hello", "the hello world"]
SAMPLED = SamplingParams(max_tokens=24, seed=3, temperature=0.7)


def texts(file: str, prompts: list[str] = PROMPTS, params: SamplingParams = SAMPLED, **options: Any) -> list[Any]:
    with LLM(file, runtime="llama", **options) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain(files: dict[str, str]) -> dict[str, list[Any]]:
    return {name: texts(files[name], method="autoregressive") for name in files}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "speculative", "drafter": "ngram"},
        {"method": "speculative", "drafter": "lookahead"},
        {"method": "speculative", "draft": "own"},
        {"method": "speculative", "draft": "equal"},
        {"method": "card", "draft": "own", "worker": "inline"},
        {"method": "card", "draft": "equal", "worker": "thread"},
        {"method": "card", "draft": "equal", "worker": "process"},
        {"method": "planned", "draft": "equal"},
        {"method": "pearl", "draft": "own"},
        {"method": "speculative", "drafter": "translated", "draft": "equal"},
        {"method": "speculative", "draft": "layers:0-3"},
        {"method": "autoregressive", "kv_memory": 0.0001},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["grouped", "lfm2"])
def test_texts_do_not_depend_on_the_method(
    files: dict[str, str], plain: dict[str, list[Any]], name: str, options: dict[str, Any]
) -> None:
    draft = options.get("draft")
    named = {"draft": files[name if draft == "own" else draft]} if draft in ("own", "equal") else {}
    assert texts(files[name], **options | named) == plain[name]


def test_texts_do_not_depend_on_the_method_without_exact_mode(files: dict[str, str], chains: list[int]) -> None:
    file, prompts, params = files["grouped"], [prompt * 5 for prompt in PROMPTS], SamplingParams(max_tokens=24)
    plain = texts(file, prompts, params, method="autoregressive")
    assert not chains
    for options in (
        {"method": "autoregressive"},
        {"method": "speculative", "drafter": "ngram"},
        {"method": "card", "draft": files["equal"], "worker": "inline"},
    ):
        assert texts(file, prompts, params, exact=False, **options) == plain, options
        assert max(chains) >= 16
        chains.clear()


@pytest.mark.parametrize("name", ["grouped", "equal", "next", "lfm2"])
def test_transformers_writes_the_same_texts(
    pairs: Callable[[str], Pair], files: dict[str, str], plain: dict[str, list[Any]], name: str
) -> None:
    folder = recurrent.with_tokenizer(pairs(name).folder)
    for options in (
        {"method": "autoregressive"},
        {"method": "speculative", "draft": str(folder)},
        {"method": "speculative", "drafter": "ngram"},
    ):
        with LLM(folder, runtime="transformers", **options) as llm:
            got = [output.token_ids for output in llm.generate(PROMPTS, SAMPLED)]
        assert got == plain[name], options
    if name in ("grouped", "next"):
        with pytest.raises(UserError, match="are in another order than transformers expects"):
            load_model(files[name], runtime="transformers")
    else:
        with LLM(files[name], runtime="transformers", method="autoregressive") as llm:
            assert [output.token_ids for output in llm.generate(PROMPTS, SAMPLED)] == plain[name]


@pytest.mark.parametrize("name", ["grouped", "lfm2"])
def test_a_prefix_hit_writes_what_a_fresh_start_writes(
    files: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, short, read = "hello world " * 30, SamplingParams(max_tokens=8, seed=1), list[int]()
    monkeypatch.setattr("outpace.engine.kv_memory._SNAPSHOT_TOKENS", 48)
    score = Llama._score_hidden

    def count(model: Llama, forest: Any, layers: Any) -> Any:
        read.append(sum(len(part.tokens) for part in forest))
        return score(model, forest, layers)

    with LLM(files[name], runtime="llama", method="autoregressive") as llm:
        monkeypatch.setattr(llm.engine, "_chunk", 16)
        answer = llm.generate([first], short)[0]
        # the whole text goes on; the prompt does; it changes in the middle, after a snapshot; it is repeated
        for prompt in (first + answer.text + "12", first + "hello", first[:200] + "12 12", first):
            fresh = texts(files[name], [prompt], short, method="autoregressive")[0]
            monkeypatch.setattr(Llama, "_score_hidden", count)
            assert llm.generate([prompt], short)[0].token_ids == fresh, prompt
            monkeypatch.setattr(Llama, "_score_hidden", score)
            assert sum(read) < 64, (prompt, read)  # a text has 90 tokens and more
            read.clear()
        both = llm.generate([first + "or 12", first + "or 12"], short)
        assert both[0].token_ids == both[1].token_ids
