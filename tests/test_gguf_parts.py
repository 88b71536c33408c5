"""Models in several .gguf files: the same as in one, and each way in which a part can be wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from files import weights, write_gguf

import outpace
from outpace.core.errors import UserError
from outpace.models.files.find import resolve
from outpace.models.files.gguf.header import part_files, part_names
from outpace.models.files.gguf.source import GgufSource
from outpace.models.files.hub import HubName, choose_files

NAME = HubName("owner/name", None, None)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    (tmp_path / "parts").mkdir()
    first = write_gguf(tmp_path / "parts" / "tiny.gguf", kind="Q8_0", split=5)
    return part_files(first)


def test_parts_are_the_whole(parts: list[Path], tmp_path: Path) -> None:
    """Compare tensors and tokenizer, read in place and converted, and the text of kernels and torch."""
    whole = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    assert len(parts) > 3
    assert all(file.is_file() for file in parts)
    with GgufSource(parts[0]) as several, GgufSource(whole) as one:
        assert several.names() == one.names()
        assert several.config == one.config
        assert {several.file_of(name) for name in several.names()} == set(parts)
        for name in one.names():
            assert np.array_equal(several.array(name), one.array(name))
        assert several.tokenizer.tokenizer.to_str() == one.tokenizer.tokenizer.to_str()
    for options in ({}, {"runtime": "llama"}):
        texts = []
        for model in (parts[0], whole):
            with outpace.load(str(model), method="autoregressive", profile=False, **options) as llm:
                texts.append(llm.generate("hello world", max_tokens=20, ignore_eos=True)[0].tokens)
        assert texts[0] == texts[1]


def test_a_part_that_changes_is_converted_anew(parts: list[Path], tmp_path: Path) -> None:
    before = resolve(str(parts[0]), cache=tmp_path / "cache")
    assert resolve(str(parts[0]), cache=tmp_path / "cache") == before
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert resolve(str(parts[0]), cache=tmp_path / "cache") != before


def test_what_is_wrong_with_a_part_is_said(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"is part 2 of {len(parts)}: name the first one, .*{parts[0].name}"):
        GgufSource(parts[1])
    held = parts[1].read_bytes()
    shutil.copyfile(parts[2], parts[1])
    with pytest.raises(UserError, match=f"{parts[1].name} does not belong to .*: it has split.no 2 and split.count"):
        GgufSource(parts[0])
    parts[1].write_bytes(held[: len(held) // 2])
    with pytest.raises(UserError, match=f"{parts[1].name} is truncated"):
        GgufSource(parts[0])
    parts[1].write_text("no model")
    with pytest.raises(UserError, match=f"{parts[1].name} is not a GGUF file"):
        GgufSource(parts[0])
    parts[1].unlink()
    with pytest.raises(UserError, match=f"{parts[1].name} is missing: .* is the first of {len(parts)} parts"):
        GgufSource(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match="so the first one's name must end in"):
        GgufSource(tmp_path / "renamed.gguf")


def test_parts_of_two_models_are_told_apart(parts: list[Path], tmp_path: Path) -> None:
    """By the number of tensors, and by one that both have."""
    tensors = weights()
    fewer = {name: values for name, values in tensors.items() if "layers.1" not in name}
    (tmp_path / "other").mkdir()
    other = write_gguf(tmp_path / "other" / "tiny.gguf", kind="Q8_0", split=-(-len(fewer) // len(parts)), tensors=fewer)
    others = part_files(other)
    assert len(others) == len(parts)
    shutil.copyfile(others[-1], parts[-1])
    with pytest.raises(UserError, match=r"split.tensors.count is|so does another part"):
        GgufSource(parts[0])


def test_damage_names_the_part(parts: list[Path]) -> None:
    with GgufSource(parts[0]) as source:
        name = next(name for name in source.names() if source.file_of(name) == parts[2] and "proj" in name)
        entry = source._header.tensors[source._source(name)]
    data = bytearray(parts[2].read_bytes())
    data[entry.start + 1] = 0x7C  # an infinite scale
    parts[2].write_bytes(data)
    with pytest.raises(UserError, match=f"{parts[2].name} is damaged: tensor .* not finite"):
        outpace.load(str(parts[0]), method="autoregressive", profile=False)
    with pytest.raises(UserError, match=f"{parts[2].name} is damaged: tensor .* not finite"):
        outpace.load(str(parts[0]), method="autoregressive", profile=False, runtime="llama")


def test_names_of_parts() -> None:
    assert part_names("a-00002-of-00003.gguf") == [f"a-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for name in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-2-of-3.gguf", "-00001-of-00002.gguf"):
        assert part_names(name) == [name]


def test_the_hub_gives_all_parts() -> None:
    three = [f"sub/name-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert choose_files(NAME, [*three, "README.md"]) == three
    both = [*three, "name-Q8_0.gguf"]
    assert choose_files(replace(NAME, file="q4_k_m"), both) == three
    assert choose_files(replace(NAME, file=three[0]), both) == three
    assert choose_files(replace(NAME, file="q8_0"), both) == ["name-Q8_0.gguf"]
    with pytest.raises(UserError, match="several GGUF files"):
        choose_files(NAME, both)
    with pytest.raises(UserError, match=r"holds sub/name.*00001.* and no sub/name.*00002-of-00003.gguf"):
        choose_files(NAME, [three[0], three[2]])
