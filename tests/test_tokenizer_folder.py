"""Tokenizer folders written by current and earlier versions of transformers are read as transformers reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from files import TEMPLATE, folder_of, write_gguf
from test_tokenizer import TEXTS, sentence_piece
from tokenizers import AddedToken

from outpace.core.errors import UserError
from outpace.models.files.hub import HubName, choose_files
from outpace.models.text import tokenizer
from outpace.models.text.tokenizer import Tokenizer

ADDED = [
    AddedToken("<tool>", special=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("<left>", lstrip=True, special=True),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True),
    AddedToken("Upper", normalized=True),
]
NAMED = [token.content for token in ADDED]


@pytest.fixture(autouse=True)
def no_tokenizer_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_LAST", [])


def byte_level(where: Path) -> Any:
    folder = folder_of(write_gguf(where / "a.gguf"), where / "plain")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


def with_spaces(where: Path) -> Any:
    folder = folder_of(sentence_piece(where / "a.gguf"), where / "plain")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama(where: Path) -> Any:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    return transformers.LlamaTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=merges)


def as_saved(_: Path) -> None:
    """Keep the folder as this version of transformers writes it."""


def listed_by_id(folder: Path) -> None:
    """Name the tokens in tokenizer_config.json alone."""
    moved = {str(token.pop("id")): token for token in taken_out(folder)}
    change(folder, "tokenizer_config.json", added_tokens_decoder=moved)


def with_other_flags(folder: Path) -> None:
    """Give the tokens other flags in tokenizer_config.json, which win."""
    listed = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    flags = ("lstrip", "rstrip", "normalized")
    others = [token | {flag: not token[flag] for flag in flags} | {"special": True} for token in listed]
    by_id = {str(token.pop("id")): token for token in others}
    change(folder, "tokenizer_config.json", added_tokens_decoder=by_id)


def in_older_files(folder: Path) -> None:
    """Name the tokens in added_tokens.json and special_tokens_map.json."""
    moved = taken_out(folder)
    (folder / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in moved}))
    special = [token["content"] for token in moved if token["special"]]
    own = json.loads((folder / "tokenizer_config.json").read_text())
    old = {"bos_token": {"content": own["bos_token"], "lstrip": False}, "extra_special_tokens": special}
    (folder / "special_tokens_map.json").write_text(json.dumps(old))


def in_older_files_also(folder: Path) -> None:
    """Name the tokens of tokenizer.json once more in added_tokens.json, without their flags."""
    listed = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    (folder / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in listed}))


def as_special_tokens(folder: Path) -> None:
    """Name the tokens in fields of tokenizer_config.json only."""
    first, *others = [token["content"] for token in taken_out(folder)]
    change(folder, "tokenizer_config.json", image_token=first, extra_special_tokens=others, pad_token="[NEW]")


def taken_out(folder: Path) -> list[dict[str, Any]]:
    """Remove the added tokens from tokenizer.json and return them."""
    data = json.loads((folder / "tokenizer.json").read_text())
    taken = [token for token in data["added_tokens"] if token["content"] in NAMED]
    change(folder, "tokenizer.json", added_tokens=[token for token in data["added_tokens"] if token not in taken])
    return taken


def change(folder: Path, name: str, **fields: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("make", [byte_level, with_spaces, llama])
@pytest.mark.parametrize(
    "rewrite", [as_saved, listed_by_id, with_other_flags, in_older_files, in_older_files_also, as_special_tokens]
)
def test_texts_are_tokenized_as_by_transformers(
    tmp_path: Path, make: Callable[[Path], Any], rewrite: Callable[[Path], None]
) -> None:
    folder, chance = tmp_path / "folder", random.Random(0)
    made = make(tmp_path)
    made.add_tokens(ADDED)
    made.save_pretrained(folder)
    rewrite(folder)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    pieces = [*NAMED, *TEXTS, " ", "  ", "a", "b", "sword", "upper", "[NEW]", "</s>", "<|im_end|>"]
    for _ in range(200):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 6)))
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.special_ids >= {*theirs.all_special_ids}
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.stop_ids
    assert {*NAMED} <= {*ours.words.values()}


@pytest.mark.parametrize("adds", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_tokenizer_json_decides_the_tokens_around_a_text(tmp_path: Path, adds: dict[str, bool]) -> None:
    for make in (byte_level, llama):
        folder = tmp_path / make.__name__
        made = make(tmp_path)
        for name, value in adds.items():
            setattr(made, name, value)
        made.save_pretrained(folder)
        for more in ({}, {"add_bos_token": True, "add_eos_token": True}):
            change(folder, "tokenizer_config.json", **more)
            theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
            assert ours.encode("ab a") == theirs("ab a").input_ids


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"5": {"content": "new"}}},
            "give 'new' the id 5, in tokenizer.json that is",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"999": {"content": "new"}}},
            "the id 999, in tokenizer.json there is no",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "new"}}},
            r"ids of added tokens are \['x'\]",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"272": 7}},
            "7 is no token, it must be a string or an object",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "whole numbers"),
        ("tokenizer_config.json", {"extra_special_tokens": [{"content": "x", "lstrip": 1}]}, "is no token"),
        ("added_tokens.json", {"new": "last"}, r"added_tokens.json: the ids of added tokens are \['last'\]"),
        ("added_tokens.json", {"new": 5}, "give 'new' the id 5, in tokenizer.json that is"),
    ],
)
def test_contradictory_and_damaged_files_are_refused(
    tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    byte_level(tmp_path).save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "added_tokens.json").write_text("{}")
    change(tmp_path / "folder", file, **fields)
    with pytest.raises(UserError, match=words):
        Tokenizer.from_folder(tmp_path / "folder")


def test_the_older_name_of_extra_special_tokens(tmp_path: Path) -> None:
    """Its tokens are special, as in transformers 4; version 5 reads this field in tokenizer_config.json only."""
    byte_level(tmp_path).save_pretrained(tmp_path / "folder")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "folder" / "special_tokens_map.json").write_text("{}")
        change(tmp_path / "folder", name, additional_special_tokens=["<tool>"])
        tokenizer = Tokenizer.from_folder(tmp_path / "folder")
        assert tokenizer.id_of("<tool>") in tokenizer.special_ids
        change(tmp_path / "folder", "tokenizer_config.json", additional_special_tokens=[])


MODEL_SPECIFIC = "model_specific_special_tokens"
ADDED_TOKEN = {"__type": "AddedToken", "content": "<eye>", "lstrip": True, "rstrip": True, "normalized": False}


@pytest.mark.parametrize(
    "fields",
    [
        {MODEL_SPECIFIC: {"image_token": "<eye>", "think_token": "<think>"}},
        {MODEL_SPECIFIC: {"image_token": ADDED_TOKEN | {"single_word": False, "special": True}}},
        {MODEL_SPECIFIC: {"image_token": "<|im_end|>"}},
        {MODEL_SPECIFIC: {"eye": "<eye>"}, "extra_special_tokens": ["<ear>"]},
        {MODEL_SPECIFIC: {"think_token": "<think>"}, "image_token": "<eye>"},  # transformers takes the latter alone
        {"extra_special_tokens": {"image_token": "<eye>", "think_token": "<think>"}},
        {MODEL_SPECIFIC: None},
    ],
    ids=range(7),
)
def test_special_tokens_of_a_model_have_names(tmp_path: Path, fields: dict[str, Any]) -> None:
    """They are tokens of their own, and chat templates may use their names."""
    made, folder = byte_level(tmp_path), tmp_path / "folder"
    made.chat_template = "{{ bos_token }}|{{ image_token }}|{{ think_token }}"
    made.save_pretrained(folder)
    change(folder, "tokenizer_config.json", **fields)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in ("a<eye>b", " <eye> <think>x", "<ear><|im_end|><think>"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
    assert ours.special_ids >= {*theirs.all_special_ids}
    asked = [{"role": "user", "content": "hi"}]
    assert ours.render(asked) == theirs.apply_chat_template(asked, tokenize=False)


@pytest.mark.parametrize("value", [["<eye>"], "<eye>", {"image_token": 7}])
def test_names_of_special_tokens_that_are_none(tmp_path: Path, value: Any) -> None:
    byte_level(tmp_path).save_pretrained(tmp_path / "folder")
    change(tmp_path / "folder", "tokenizer_config.json", **{MODEL_SPECIFIC: value})
    with pytest.raises(UserError, match=r"must be an object of names and tokens|7 is no token"):
        Tokenizer.from_folder(tmp_path / "folder")


SPACED = [" lead", "hello world", "a<|im_end|>b c", "</s>a ab", "  two"]


@pytest.mark.parametrize("is_added", [True, False, None])
@pytest.mark.parametrize(
    ("make", "name", "model_type", "more"),
    [
        (byte_level, "GPT2TokenizerFast", "llama", {}),
        (byte_level, "GPT2Tokenizer", "mistral", {}),  # whose class is not that of the folder
        (byte_level, "PreTrainedTokenizerFast", "llama", {}),  # does not read the field
        (byte_level, "LlamaTokenizerFast", "smollm3", {}),  # is not used for a byte-level tokenizer
        (llama, "LlamaTokenizerFast", "llama", {}),
        (llama, "LlamaTokenizer", "smollm3", {"legacy": True}),
        (llama, "LlamaTokenizerFast", "phi3", {}),
        (with_spaces, "LlamaTokenizer", "llama", {"legacy": False}),
    ],
    ids=range(8),
)
def test_a_space_before_a_text(
    tmp_path: Path, make: Callable[[Path], Any], name: str, model_type: str, more: dict[str, Any], is_added: bool | None
) -> None:
    """The class that transformers chooses reads add_prefix_space, or ignores it."""
    if more and is_added is None:
        pytest.skip("without the field tokenizer.json decides here; transformers 5 still reads `legacy`")
    folder = tmp_path / "folder"
    make(tmp_path).save_pretrained(folder)
    said = {"tokenizer_class": name, **more, **({} if is_added is None else {"add_prefix_space": is_added})}
    change(folder, "tokenizer_config.json", **said)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in SPACED if make is not llama else SPACED[3:]:
        ids = theirs(text).input_ids
        assert Tokenizer.from_folder(folder).encode(text) == ids, text
        assert Tokenizer.from_folder(folder).decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    change(folder, "tokenizer_config.json", add_prefix_space="yes")
    with pytest.raises(UserError, match="add_prefix_space is 'yes', it must be true or false"):
        Tokenizer.from_folder(folder)


def test_a_folder_does_not_change_the_next_one(tmp_path: Path) -> None:
    """Both have the same tokenizer.json, which is cached."""
    made = byte_level(tmp_path)
    for name in ("one", "two"):
        made.save_pretrained(tmp_path / name)
    change(tmp_path / "one", "tokenizer_config.json", image_token="<image>")
    assert "<image>" in Tokenizer.from_folder(tmp_path / "one").words.values()
    assert "<image>" not in Tokenizer.from_folder(tmp_path / "two").words.values()


TOOL = {"type": "function", "function": {"name": "add"}}
TEMPLATES = {"default": TEMPLATE, "tool_use": "{{ tools | length }}", "rag": "{{ documents[0] }}"}


@pytest.mark.parametrize("names", [["default"], ["default", "tool_use"], ["tool_use", "rag"], [*TEMPLATES]])
@pytest.mark.parametrize("as_files", [True, False])
def test_templates(tmp_path: Path, names: list[str], as_files: bool) -> None:
    made, folder, messages = byte_level(tmp_path), tmp_path / "folder", [{"role": "user", "content": "hi"}]
    made.chat_template = {name: TEMPLATES[name] for name in names}
    made.save_pretrained(folder, save_jinja_files=as_files)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert ours.has_template == ("default" in names)
    for tools in (None, [TOOL]):
        if tools and "tool_use" in names:
            assert ours.render(messages, tools=tools) == "1"
        elif "default" in names:
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
            assert ours.render(messages, tools=tools) == expected
        else:
            with pytest.raises(UserError, match="no chat template, only one for rag, tool_use"):
                ours.render(messages, tools=tools)


def test_files_of_templates_come_before_the_config(tmp_path: Path) -> None:
    byte_level(tmp_path).save_pretrained(tmp_path / "folder")
    change(tmp_path / "folder", "tokenizer_config.json", chat_template=[{"name": "default", "template": "config"}])
    tokenizer = Tokenizer.from_folder(tmp_path / "folder")
    assert tokenizer.render([]) == "config"
    (tmp_path / "folder" / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path / "folder").render([]) == "file"


def test_the_hub_downloads_all_templates() -> None:
    files = ["config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja"]
    assert sorted(choose_files(HubName("owner/name"), [*files, "other/a.jinja"])) == sorted(files)
