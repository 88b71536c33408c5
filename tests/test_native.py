"""The native pass against its emulation in numpy, and against itself: instruction sets, threads, trees, kept slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from files import smollm2_file
from passes import branch, fresh, prefilled, random_parents, text
from torch import Tensor
from turns import in_turn

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict
from outpace.models.llama.native import binding
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.binding import NativeOptions, UnsupportedShape
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import Loaded
from outpace.models.text.tokenizer import Tokenizer

kernels = pytest.importorskip("outpace_kernels", reason="outpace-kernels is not installed: `pip install ./kernels`")

TINY = reference.TINY
TINIES = {
    "tiny": TINY,
    "biased": replace(TINY, tie_embeddings=False, attention_bias=True, output_bias=True, mlp_bias=True),
    "odd": replace(TINY, vocab_size=130, hidden_size=100, intermediate_size=70, head_dim=22, attention_bias=True),
    "normed": replace(TINY, head_dim=80, num_kv_heads=6, head_norm=True, rotary_layers=(True, False, True)),
    "windows": replace(TINY, head_dim=22, windows=(5, None, 33), rotary_layers=(True, True, False)),
    "phi": reference.PHI,
    "gemma": replace(reference.GEMMA, hidden_size=100, intermediate_size=70, windows=(7, None, 40, 19)),
}
SETS = kernels.instruction_sets()


def tiny(config: LlamaConfig, head_ids: Tensor | None = None, **options: object) -> NativeLlama:
    tensor = reference.random_tensors(config).__getitem__
    return NativeLlama.from_tensors(config, tensor, options=NativeOptions(**options), head_ids=head_ids)


def open_smollm2(**options: object) -> NativeLlama:
    smollm2_file()
    with Checkpoint.open(resolve(None)) as checkpoint:
        return NativeLlama.from_tensors(
            from_dict(checkpoint.config), checkpoint.tensor, options=NativeOptions(**options)
        )


@pytest.fixture(scope="module")
def smollm2() -> NativeLlama:
    return open_smollm2()


@pytest.fixture(params=[*TINIES, "float16", "int8", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def model(request: pytest.FixtureRequest) -> NativeLlama:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return tiny(TINIES[request.param]) if request.param in TINIES else tiny(TINIES["odd"], kv_dtype=request.param)


def tree_scores(model: NativeLlama) -> tuple[Tensor, np.ndarray]:
    """Return the logits of a tree after a prompt, and the contents of the slots afterwards."""
    session = prefilled(model, text(model, 37))
    scores = model.score([Part(session, text(model, 24, 2), random_parents(24, 1), range(24))])
    return scores, session.read(37 + 24)


@pytest.mark.parametrize(("name", "kv_dtype"), in_turn(TINIES, kernels.KV_DTYPES))
def test_the_kernels_are_what_their_emulation_says(name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace_kernels import emulation

    got = tree_scores(tiny(TINIES[name], kv_dtype=kv_dtype))
    monkeypatch.setattr(native, "load_kernels", lambda: emulation)
    expected = tree_scores(tiny(TINIES[name], kv_dtype=kv_dtype))
    assert torch.equal(got[0], expected[0])
    assert np.array_equal(got[1], expected[1])


@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_scores_follow_the_reference(config: LlamaConfig) -> None:
    """Rounding to int8 moves random models by up to a fifth; a wrong wiring moves them by more than their norm."""
    model, tokens = tiny(config), text(tiny(config), 60)
    got = model.score([chain(model.open(100, 100), tokens, wanted=range(60))]).double()
    expected = reference.logits(config, reference.random_tensors(config).__getitem__, tokens)
    assert (got - expected).norm() < 0.25 * expected.norm()


@pytest.mark.parametrize("kv_dtype", kernels.KV_DTYPES)
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_gives_the_same_bits(name: str, config: LlamaConfig, kv_dtype: str) -> None:
    expected = tree_scores(tiny(config, instruction_set="portable", threads=1, kv_dtype=kv_dtype))
    model = tiny(config, instruction_set=name, kv_dtype=kv_dtype)
    got = tree_scores(model)
    assert model.instruction_set == name
    assert torch.equal(got[0], expected[0])
    assert np.array_equal(got[1], expected[1])


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1},
        *(pytest.param({"instruction_set": name}, marks=pytest.mark.long) for name in SETS),
    ],
    ids=str,
)
def test_the_real_model_has_one_set_of_bits(smollm2: NativeLlama, options: dict) -> None:
    tokens = text(smollm2, 13)
    assert torch.equal(fresh(open_smollm2(**options), tokens), fresh(smollm2, tokens))


def test_a_tree_scores_as_its_paths_do(model: NativeLlama) -> None:
    prompt = text(model, 37)
    parents, tokens = random_parents(24, 1), text(model, 24, 2)
    got = model.score([Part(prefilled(model, prompt), tokens, parents, range(24))])
    for node in range(0, 24, 1 if model.num_layers < 10 else 4):  # the shipped model's passes take long
        path = [tokens[other] for other in branch(parents, node)]
        assert torch.equal(got[node], fresh(model, prompt + path))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 18, 19, 25])
def test_a_row_does_not_see_how_many_travel_with_it(count: int) -> None:
    """Every way to cut rows into tiles."""
    model = tiny(TINIES["odd"])
    prompt, tokens = text(model, 9), text(model, count, 1)
    got = model.score([Part(prefilled(model, prompt), tokens, [PREFIX] * count, range(count))])
    for node, token in enumerate(tokens):
        assert torch.equal(got[node], fresh(model, [*prompt, token]))


def test_kept_keys_and_values_equal_a_fresh_prefill(model: NativeLlama) -> None:
    prompt, written = text(model, 30), []
    session = prefilled(model, prompt)
    keep: list[int] = []
    for turn in range(6):
        parents, tokens = random_parents(12, turn), text(model, 12, 10 + turn)
        got = model.score([Part(session, tokens, parents, range(12), keep)])
        node = random.Random(turn).randrange(12)
        keep = branch(parents, node)
        written += [tokens[other] for other in keep]
        assert torch.equal(got[node], fresh(model, prompt + written))
    session.keep(keep)
    full = prompt + written
    assert session.length == len(full)
    assert np.array_equal(session.read(len(full)), prefilled(model, full).read(len(full)))


def test_live_nodes_survive_a_correction(model: NativeLlama) -> None:
    prompt, tokens = text(model, 15), text(model, 8, 5)
    parents = [PREFIX, 0, 0, 1, 2, 3, 5, 4]
    session = prefilled(model, prompt)
    model.score([Part(session, tokens, parents, [])])
    session.keep([0, 1], [3, 5, 6])  # 3 is the new root, 5 and 6 hang below it
    got = model.score([Part(session, [7], [2], [0])])[0]
    assert torch.equal(got, fresh(model, [*prompt, *(tokens[n] for n in (0, 1, 3, 5, 6)), 7]))


def test_a_session_that_starts_from_another_equals_a_fresh_prefill(model: NativeLlama) -> None:
    tokens = text(model, 12)
    first, second = model.open(64, 64), model.open(32, 64)
    model.score([chain(first, tokens)])
    first.keep(range(12))
    second.start_from(first, 9)
    first.truncate(0)
    model.score([chain(first, text(model, 12, 3))])  # the copy is independent
    again = model.score([chain(second, tokens[9:], range(3))])
    assert torch.equal(again, model.score([chain(model.open(64, 64), tokens, range(9, 12))]))


def test_a_forest_scores_as_its_trees_one_by_one(model: NativeLlama) -> None:
    prompts = [text(model, count, count) for count in (5, 33, 64)]
    trees = [(text(model, size, 20 + size), random_parents(size, size)) for size in (1, 7, 12)]
    parts = [
        Part(prefilled(model, prompt), *tree, range(len(tree[0]))) for prompt, tree in zip(prompts, trees, strict=True)
    ]
    alone = [
        model.score([Part(prefilled(model, p), *t, range(len(t[0])))]) for p, t in zip(prompts, trees, strict=True)
    ]
    piece = chain(model.open(300, 300), text(model, 40, 9))  # a prompt's chunk travels along
    assert torch.equal(model.score([parts[0], piece, *parts[1:]]), torch.cat(alone))


def test_chunks_of_a_prompt_equal_the_whole(model: NativeLlama) -> None:
    prompt, session, start = text(model, 300), model.open(320, 300), 0
    for size in (1, 2, 64, 100, 132):
        model.score([chain(session, prompt[start : start + size], keep=range(session.pending))])
        start += size
    got = model.score([chain(session, [prompt[-1]], wanted=[0], keep=range(session.pending))])[0]
    assert torch.equal(got, fresh(model, prompt))


def test_only_wanted_rows_are_scored(model: NativeLlama) -> None:
    session = model.open(50, 50)
    assert model.score([chain(session, text(model, 10), wanted=[3, 9])]).shape == (2, model.vocab_size)
    assert model.score([chain(session, [1], keep=range(10))]).shape == (0, model.vocab_size)


def test_a_reduced_output_layer_scores_its_tokens_only() -> None:
    whole, ids = tiny(TINY), torch.tensor([5, 96, 0, 41])
    got, expected = fresh(tiny(TINY, head_ids=ids), [1, 2, 3]), fresh(whole, [1, 2, 3])
    assert torch.equal(got[ids], expected[ids])
    assert int(got.isinf().sum()) == TINY.vocab_size - 4
    with pytest.raises(UserError, match="between 0 and 96"):
        tiny(TINY, head_ids=torch.tensor([97]))


def test_a_shallow_model_shares_the_layers() -> None:
    model = tiny(TINY)
    assert torch.equal(fresh(model.select_layers([0, 1, 2]), [1, 2, 3]), fresh(model, [1, 2, 3]))
    assert not torch.equal(fresh(model.select_layers([0, 2]), [1, 2, 3]), fresh(model, [1, 2, 3]))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedShape, match="head_dim is 258"):
        tiny(replace(TINY, head_dim=258))
    for threads in (0, binding.usable_cores() + 1):
        with pytest.raises(UserError, match=f"threads is {threads}"):
            NativeOptions(threads=threads)
    with pytest.raises(UserError, match="unknown kv_dtype"):
        NativeOptions(kv_dtype="int4")
    with pytest.raises(UserError, match="unknown instruction_set 'mmx'"):
        tiny(TINY, instruction_set="mmx")


def test_tokens_and_stores_that_do_not_belong_raise() -> None:
    model, other = tiny(TINY), tiny(replace(TINY, num_layers=2))
    with pytest.raises(ValueError, match="token 97 is out of range"):
        model.score([chain(model.open(9, 9), [97], [0])])
    with pytest.raises(ValueError, match="another model"):
        model.score([chain(other.open(9, 9), [1], [0])])


@pytest.mark.smollm2
def test_perplexity_is_near_the_float32_models() -> None:
    """A coarse guard; docs/log.md has the figures over 15 thousand tokens."""
    smollm2_file()
    folder = resolve(None)
    tokens = Tokenizer.from_folder(folder).encode(ENGLISH)
    with Checkpoint.open(folder) as checkpoint:
        exact = Llama.from_tensors(from_dict(checkpoint.config), checkpoint.tensor, exact=False)
    losses = [loss(model, tokens) for model in (exact, open_smollm2())]
    assert abs(losses[1] - losses[0]) < 0.05


def loss(model: Llama | NativeLlama, tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of a text's tokens, nats."""
    count = len(tokens) - 1
    scores = model.score([chain(model.open(count, count), tokens[:-1], wanted=range(count))])
    return torch.nn.functional.cross_entropy(scores.float(), torch.tensor(tokens[1:])).item()


ENGLISH = (
    "The river rises in the hills to the north of the town and runs past the old mill, where the water once turned "
    "three wheels. In spring it carries branches and foam; by August one can cross it on stones. Children learn to "
    "swim in the pool below the bridge, and in the evening their parents sit on the bank and talk about the harvest. "
    "No one remembers a winter in which the pool froze over, though the schoolmaster has read of one in a letter."
)


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.long),
        pytest.param({"temperature": 0.8, "seed": 7}, id="sampled"),
    ],
)
def test_every_method_writes_plain_decodings_text(smollm2: NativeLlama, sampling: dict) -> None:
    target = Loaded(smollm2, Tokenizer.from_folder(resolve(None)), "native")
    draft = Loaded(smollm2.select_layers([*range(12), *range(16, 30)]), target.tokenizer, "draft")
    prompts = [[{"role": "user", "content": "List three colours."}], [{"role": "user", "content": "What is a cat?"}]]

    def write(model: Loaded | None, **options: object) -> tuple[list[tuple[int, ...]], int]:
        with closing(LLM(target, model, **options)) as llm:
            results = llm.generate(prompts, max_tokens=12, **sampling)
        return [tuple(result.tokens) for result in results], sum(result.figures.accepted for result in results)

    plain, _ = write(None, method="autoregressive")
    for options in ({"method": "speculative", "drafter": "model+ngram"}, {"method": "card", "drafter": "model"}):
        texts, accepted = write(draft, **options)
        assert texts == plain, options
        assert accepted > 0, options
