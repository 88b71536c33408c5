"""What the transformers runtime writes, by every method, against transformers' own generate; and how it is loaded."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from files import folder_of, write_gguf
from safetensors.torch import load_file, save_file
from turns import in_turn

import outpace
from outpace.api.llm import LLM
from outpace.cli.options import ModelFlags
from outpace.core import errors
from outpace.core.errors import UserError, install_command
from outpace.engine.options import BuildOptions
from outpace.models.hf.load import SlowTokenizer, wrap_tokenizer
from outpace.models.hf.model import TransformersModel
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import Loaded, load_draft, load_model
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer

PROMPT = "hello world 12 hello world 12 hello, hello"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "autoregressive"},
    "ngram": {"method": "speculative", "drafter": "ngram"},
    "model": {"method": "speculative", "drafter": "model"},
    "card": {"method": "card", "drafter": "model+ngram", "worker": "inline"},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    where = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_folder(folder_of(write_gguf(where / "model.gguf"), where / "tokenizer"))


def noisy(module: Any, amount: float = 0.02) -> Any:
    """A draft that agrees with its target mostly."""
    other = copy.deepcopy(module)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += amount * torch.randn_like(weight)
    return other


@lru_cache
def pair(name: str) -> tuple[Any, Any]:
    module = tiny.build(name)
    return module, noisy(module)


def generate(module: Any, tokenizer: Tokenizer, count: int, prompt: str = PROMPT) -> list[int]:
    """Greedy text by transformers itself."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    written = module.generate(ids, eos_token_id=sorted(tokenizer.stop_ids), **options)
    return written[0, ids.shape[1] :].tolist()


def write(target: Loaded, draft: Loaded | None, how: str, count: int = 40, prompt: str = PROMPT) -> Any:
    needs = draft if "model" in METHODS[how].get("drafter", "") else None
    with LLM(target, needs, **METHODS[how]) as llm:
        return llm.stream(prompt, max_tokens=count).finish()


@pytest.mark.parametrize(
    ("name", "how"), in_turn(["gpt2", "gpt_neox", "gemma2", "mixtral", "mistral", "bloom"], METHODS)
)
def test_every_method_writes_what_generate_writes(name: str, how: str, tokenizer: Tokenizer) -> None:
    module, near = pair(name)
    target = load_model(module, tokenizer=tokenizer)
    result = write(target, load_draft(near, target), how, 30)
    assert list(result.tokens) == generate(module, tokenizer, 30)
    assert result.figures.accepted > 0 or how == "plain"


@pytest.mark.parametrize("how", METHODS)
def test_the_context_is_used_to_its_last_token(how: str, tokenizer: Tokenizer) -> None:
    module = tiny.build("gpt2", n_positions=48)
    target = load_model(module, tokenizer=tokenizer)
    result = write(target, load_draft(noisy(module), target), how, 100)
    left = 48 - len(tokenizer.encode(PROMPT))
    assert list(result.tokens) == generate(module, tokenizer, left)
    assert len(result.tokens) == left
    assert result.finish_reason == "length"


@pytest.mark.parametrize("how", ["model", "card"])
def test_a_draft_with_a_shorter_context_stops_drafting_there(how: str, tokenizer: Tokenizer) -> None:
    module, length = tiny.build("gpt2"), len(tokenizer.encode(PROMPT))
    short = noisy(tiny.build("gpt2", n_positions=length + 12), 0.0)
    with torch.no_grad():
        for name, weight in short.named_parameters():
            weight.copy_(module.get_parameter(name)[: len(weight)])
    target = load_model(module, tokenizer=tokenizer)
    with LLM(target, load_draft(short, target), **METHODS[how] | {"drafter": "model"}) as llm:
        result = llm.stream(PROMPT, max_tokens=60).finish()
        beyond = llm.stream(PROMPT * 3, max_tokens=20).finish()  # the prompt alone is longer than the draft's context
    assert list(result.tokens) == generate(module, tokenizer, 60)
    assert 0 < result.figures.accepted <= 12
    assert list(beyond.tokens) == generate(module, tokenizer, 20, PROMPT * 3)
    assert beyond.figures.drafted == 0


def test_vocabularies_may_be_padded_and_requests_batched(tokenizer: Tokenizer) -> None:
    wide, narrow = tiny.build("gpt2", vocab_size=304), tiny.build("gpt_neox")
    for big, small in ((wide, narrow), (narrow, wide)):
        target = load_model(big, tokenizer=tokenizer)
        result = write(target, load_draft(small, target), "model")
        assert list(result.tokens) == generate(big, tokenizer, 40)
    target = load_model(pair("gemma2")[0], tokenizer=tokenizer)
    prompts = [PROMPT, "hello", "12 12 12 12 12 12 12 12 12"]
    with LLM(target, method="speculative") as llm:
        together = llm.generate(prompts, max_tokens=20)
    assert [list(r.tokens) for r in together] == [generate(target.model.module, tokenizer, 20, p) for p in prompts]


def test_a_folder_goes_to_the_runtime_that_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2, llama = tiny.folder(tmp_path, "gpt2"), tiny.folder(tmp_path, "llama")
    ours = load_model(llama, dtype="float32")
    assert isinstance(ours.model, Llama)
    other, same = load_model(gpt2), load_model(str(gpt2), runtime="transformers")
    assert isinstance(other.model, TransformersModel)
    theirs = load_model(llama, runtime="transformers")
    assert isinstance(theirs.model, TransformersModel)
    texts = {write(loaded, None, "plain").tokens for loaded in (ours, theirs)}
    assert len(texts) == 1
    assert write(other, None, "ngram").tokens == write(same, None, "plain").tokens
    with pytest.raises(UserError, match="not supported by the runtime llama; --runtime transformers runs it"):
        load_model(gpt2, runtime="llama")
    with pytest.raises(UserError, match=r"unknown runtime 'lama', allowed are .*did you mean 'llama'"):
        load_model(gpt2, runtime="lama")
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(f"needs the extra torch: `{install_command('torch')}`")):
        load_model(gpt2)


def test_the_command_line_names_the_runtime_and_says_what_is_slow(tmp_path: Path, capsys: Any) -> None:
    bloom = str(tiny.folder(tmp_path, "bloom"))
    with ModelFlags(target=bloom, options=LoadOptions(runtime="transformers"), build=BuildOptions("speculative")).open(
        {}
    ) as llm:
        assert isinstance(llm.target.model, TransformersModel)
    assert f"{bloom}: chains only: every branch of a token tree costs a pass of its own" in capsys.readouterr().err
    with ModelFlags(target=bloom, options=LoadOptions(trust_remote_code=True)).open({}, quiet=True):
        assert capsys.readouterr().err == ""


def test_options_of_one_runtime_are_refused_by_the_other(tmp_path: Path) -> None:
    gpt2, llama = tiny.folder(tmp_path, "gpt2"), tiny.folder(tmp_path, "llama")
    with pytest.raises(UserError, match="exact True is for the runtimes native and llama, not for transformers"):
        load_model(gpt2, exact=True)
    with pytest.raises(UserError, match="is for the runtime transformers, not for llama"):
        load_model(llama, runtime="llama", trust_remote_code=True)
    assert isinstance(load_model(llama, trust_remote_code=True, dtype="float32").model, Llama)
    says = "is for the runtimes native and llama, not for transformers"
    with pytest.raises(UserError, match=says):
        load_draft("layers:0", load_model(gpt2))
    with pytest.raises(UserError, match="a tokenizer goes with a loaded model only"):
        load_model(gpt2, tokenizer=object())


def test_a_device_map_needs_accelerate(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path, "gpt2")
    if importlib.util.find_spec("accelerate") is None:
        with pytest.raises(UserError, match="is to be spread by a device map, which needs `pip install accelerate`"):
            load_model(folder, device_map="auto")
    else:
        assert load_model(folder, device_map={"": "cpu"}).model.device.type == "cpu"


def test_code_of_a_model_runs_only_when_asked_for(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path, "gpt2")
    trace = tmp_path / "ran"
    code = f"open({str(trace)!r}, 'w').close()\nfrom transformers import GPT2Config as A, GPT2LMHeadModel as B\n"
    (folder / "own.py").write_text(code + "class C(A):\n    model_type = 'own'\nclass M(B):\n    config_class = C\n")
    changes = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes | {"architectures": ["M"]}))
    with pytest.raises(UserError, match="brings its own Python code, which runs only with --trust-remote-code"):
        load_model(folder)
    assert not trace.exists()
    assert load_model(folder, trust_remote_code=True).model.supports_trees
    assert trace.exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", "", "model.safetensors is not a whole file, it is empty: download it again"),
        ("model.safetensors", "\x08" * 99, "cannot be loaded by transformers"),
        (
            "config.json",
            '{"model_type": "led"}',
            r"gpt2-0 is a sequence-to-sequence model \(led\): outpace takes decoder",
        ),
        ("config.json", '{"model_type": "vits"}', "is no causal language model that transformers knows"),
        ("config.json", '{"model_type": "x"}', "cannot be loaded by transformers"),
        ("tokenizer.json", "{", "the tokenizer of .* cannot be loaded"),
    ],
    ids=["empty weights", "torn weights", "led", "no causal model", "unknown", "tokenizer"],
)
def test_bad_files_are_one_sentence(tmp_path: Path, name: str, content: str, says: str) -> None:
    folder = tiny.folder(tmp_path, "gpt2")
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=says):
        load_model(folder, runtime="transformers")


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    weights = tiny.folder(tmp_path, "gpt2") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 of the model's weights, the first is"):
        load_model(weights.parent, runtime="transformers")
    weights.unlink()
    with pytest.raises(UserError, match="cannot be loaded by transformers"):
        load_model(weights.parent, runtime="transformers")


def test_a_loaded_model_is_taken_with_its_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own, near = pair("gpt2")
    with outpace.load(own, near, tokenizer=tokenizer) as llm:
        result = llm.stream(PROMPT, max_tokens=30).finish()
    assert list(result.tokens) == generate(own, tokenizer, 30)
    assert result.method == "auto"
    folder = tiny.folder(tmp_path, "gpt2")
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    loaded = load_model(module, tokenizer=theirs)
    assert loaded.name == str(folder)
    assert loaded.tokenizer.encode(PROMPT) == theirs.encode(PROMPT)
    assert write(loaded, None, "ngram").tokens == write(load_model(folder), None, "plain").tokens
    with pytest.raises(UserError, match="a loaded model needs its tokenizer, give"):
        load_model(module)
    with pytest.raises(UserError, match="int is not a tokenizer of transformers"):
        load_model(module, tokenizer=3)


def test_a_fast_tokenizer_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path, "gpt2")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.backend_tokenizer.enable_truncation(2)
    ours = wrap_tokenizer(theirs, [7])
    assert type(ours) is Tokenizer
    assert len(ours.encode(PROMPT)) > 2
    assert theirs.backend_tokenizer.truncation is not None
    assert 7 in ours.stop_ids
    assert theirs.eos_token_id in ours.stop_ids
    messages = [{"role": "user", "content": "hello"}]
    assert ours.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.tokens_differ(Tokenizer.from_folder(folder)) is None


def test_a_tokenizer_that_is_python_code_works_the_same() -> None:
    theirs = transformers.ByT5Tokenizer()
    ours = wrap_tokenizer(theirs, [5])
    assert type(ours) is SlowTokenizer
    said = "grüße, 世界 🙂!"
    ids = ours.encode(said)
    assert ids == theirs.encode(said)
    assert ours.decode(ids) == said
    assert theirs.eos_token_id in ours.stop_ids
    assert 5 in ours.stop_ids
    for cut in (ids, ids[:-3]):  # the second ends within a character
        text = ours.stream()
        pieces = [text.push([token]) for token in cut]
        assert "�" not in "".join(pieces)
        assert "".join([*pieces, text.finish()]) == ours.decode(cut)
    with pytest.raises(UserError, match="half a character"):
        ours.encode("\ud800")
    assert ours.tokens_differ(wrap_tokenizer(transformers.ByT5Tokenizer(extra_ids=5), [])) is None
