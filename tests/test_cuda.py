"""What only a GPU can show: real captures against the slow paths, streams, memory. Skipped where there is none."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from files import model_folder
from passes import TINIES, build

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gpu
import gpu_checks
import test_multi_step

import outpace
from outpace.core.errors import UserError
from outpace.models.base import Part, chain
from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama
from outpace.models.load import load_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of CUDA is here")]
METHODS = [{"method": "speculative"}, {"method": "card", "worker": "thread"}, {"method": "auto", "profile": False}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_captured_forwards_equal_the_slow_ones(dtype: torch.dtype, is_eager: bool) -> None:
    rows = gpu_checks.of_forwards("cuda", dtype, is_eager)
    assert not [row for row in rows if not row["passed"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_mode_bit_for_bit(dtype: torch.dtype) -> None:
    rows = gpu_checks.of_exact("cuda", dtype, is_eager=False)
    if "note" in rows[0]:
        pytest.skip(rows[0]["note"])
    assert not [row for row in rows if not row["passed"]]


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("draft_device", [None, "cpu"])
def test_texts_are_those_of_plain_decoding(folder: Path, options: dict[str, str], draft_device: str | None) -> None:
    given = {"device": "cuda", "dtype": "float32", "draft_device": draft_device}
    with outpace.load(folder, folder, **given, **options) as llm:
        assert isinstance(llm.target.model, GraphLlama)
        assert not llm.target.model.captures.is_eager
        rows = gpu.of_texts(llm, ["the cat sat on the", "a b a b"], 24)
    assert not [row for row in rows if not row["passed"]]


def test_a_drafter_in_a_thread_has_its_own_stream(folder: Path) -> None:
    streams = set()
    with outpace.load(folder, folder, device="cuda", method="card", worker="thread") as llm:
        score = llm.draft.model.score

        def noted(forest: object) -> torch.Tensor:
            streams.add(torch.cuda.current_stream().cuda_stream)
            return score(forest)

        llm.draft.model.score = noted
        llm.generate(["the cat sat on the"], max_tokens=8)
    assert streams
    assert torch.cuda.default_stream().cuda_stream not in streams


def test_a_missing_second_device_is_refused_first(folder: Path) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UserError, match=missing):
        outpace.load(folder, folder, device="cuda", draft_device=missing)


def exact_on_cuda() -> Any:
    """A tiny model in float32, whose products keep a row's bits or refuse."""
    try:
        return build(ExactGraphLlama, exact=True, device="cuda", is_eager=False)
    except UserError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_several_steps_in_one_graph_propose_what_single_passes_do(rule: str, steps: int) -> None:
    """In exact mode, by real captures."""
    model = exact_on_cuda()
    words = test_multi_step.words(model, 20)
    drafting = test_multi_step.Drafting(model, [test_multi_step.request_of(rule, words)], steps)
    drafting.grow([0])
    assert drafting.check(0) == 1 + 4 * (steps - 1)
    assert drafting.graphs == 1


def test_several_steps_are_taken_in_one_graph(folder: Path) -> None:
    with outpace.load(folder, folder, device="cuda", method="speculative", drafter="multi_step") as llm:
        llm.generate(["the cat sat on the"], max_tokens=24)
        assert any(key[0] == "steps" for key in llm.draft.model.captures._made)


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is here, this takes two")


@two_devices
def test_a_model_on_a_device_that_is_not_the_current_one(folder: Path) -> None:
    """Its inputs' events belong to its own stream: many small passes in a row, each with other numbers."""
    assert torch.cuda.current_device() == 0
    given = {"dtype": "float32", "graphs": "cuda"}
    models = [load_model(folder, device=f"cuda:{number}", **given).model for number in range(2)]
    rows = []
    for model in models:
        session = model.open(120, 8)
        found = [model.score([chain(session, [token, token + 1], [1], range(session.pending))]) for token in range(50)]
        rows.append(torch.cat(found).cpu())
    torch.testing.assert_close(rows[1], rows[0], atol=2e-4, rtol=2e-4)


def test_passes_are_captured_again_after_the_pool_moved(folder: Path) -> None:
    """The pool of keys and values moves: every graph is dropped, and its memory's handle with them."""
    model = load_model(folder, device="cuda", dtype="float32").model
    session = model.open(120, 8)
    first = model.score([chain(session, [1, 2, 3], [2])])
    made = model.captures.count
    others = [model.open(120, 8) for _ in range(3)]
    model.score([chain(other, [1, 2, 3], [2]) for other in others])
    again = model.score([chain(others[0], [1, 2, 3], [2])])
    assert model.captures.count > made
    torch.testing.assert_close(again, first, atol=2e-4, rtol=2e-4)


def test_a_draft_of_few_tokens_is_trained_on_a_device_and_gone_on_with(tmp_path: Path) -> None:
    """Its own tokens lie there, and so do the steps that a checkpoint hands to the optimizer; it is timed there too."""
    from distill_files import settings, silent, target_folder

    from outpace.distill.evaluate import EvaluationOptions
    from outpace.distill.run import distill
    from outpace.distill.train import read_curve

    options = settings(target_folder(tmp_path / "target"), tmp_path / "out", device="cuda", tokens=2000)
    distill(replace(options, stage="text"), silent)
    for tokens in (300, 600):
        distill(replace(options, stage="train", train=replace(options.train, tokens=tokens)), silent)
    first, second = read_curve(options.out / "training" / "curve.jsonl")
    assert 300 <= first["tokens"] < 600 <= second["tokens"]
    assert second["loss"] < 2 * first["loss"]
    judging = EvaluationOptions(prompts=2, max_tokens=16)
    found = distill(replace(options, stage="judge", tasks=options.prompts, evaluation=judging), silent)
    assert found is not None
    assert found.speed.cost > 0


@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kind_of_layer_by_kernels(config: Any, dtype: torch.dtype) -> None:
    """Windows, norms of heads, biases, layers without rotation; long texts, which are cut into pieces; wide trees."""
    tensor = test_multi_step.reference.random_tensors(config).__getitem__
    given: dict[str, Any] = {"device": "cuda", "dtype": dtype, "exact": False}
    model = gpu.captured("fused", config, tensor, **given)
    slow = build(gpu_checks.Llama, config, **given)
    words = [number % config.vocab_size for number in range(300)]
    rows = []
    for runtime in (model, slow):
        session = gpu_checks.fed(runtime, words[: min(200, config.max_positions - 70)])
        parents = gpu_checks.parents(40, 3)
        rows.append(runtime.score([Part(session, words[:40], parents, range(40))]).float())
    limit = gpu_checks.TOLERANCE[dtype] * rows[1].abs().max()
    assert (rows[0] - rows[1]).abs().max() <= limit


def test_a_loop_writes_the_engines_answers() -> None:
    """In float32, where the batch hardly rounds: all but near ties."""
    import test_distill_text as writing

    tensor = writing.TENSORS.__getitem__
    model = gpu.captured("fused", writing.reference.TINY, tensor, device="cuda", exact=False)
    expected, found = writing.write(4), writing.write_by_loop(4, model)
    assert sorted(found) == sorted(expected)
    same = [found[number].tokens.tolist() == answer.tokens.tolist() for number, answer in expected.items()]
    assert sum(same) >= len(same) - 1


def test_noise_has_the_bits_of_the_host() -> None:
    from outpace.core import noise

    words = torch.randint(-(2**31), 2**31, (9, 2), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    assert torch.equal(
        noise.exponential_from_words(words.cuda(), 5000).cpu(), noise.exponential_from_words(words, 5000)
    )
    assert torch.equal(noise.gumbel_from_words(words.cuda(), 5000).cpu(), noise.gumbel_from_words(words, 5000))
