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
from outpace.models.files.gguf.header import part_files
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.files.hub import HubName, choose_files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    (tmp_path / "parts").mkdir()
    return part_files(write_gguf(tmp_path / "parts" / "tiny.gguf", kind="Q8_0", split=5))


def test_parts_are_the_whole(parts: list[Path], tmp_path: Path) -> None:
    """Compare tensors and tokenizer, read in place and converted, and the text of kernels and torch."""
    whole = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    assert len(parts) > 3
    with GgufCheckpoint(parts[0]) as several, GgufCheckpoint(whole) as one:
        assert several.names() == one.names()
        assert several.config == one.config
        assert {several.file_of(name) for name in several.names()} == set(parts)
        assert all(np.array_equal(several.array(name), one.array(name)) for name in one.names())
        assert several.tokenizer.tokenizer.to_str() == one.tokenizer.tokenizer.to_str()
    for options in ({}, {"runtime": "llama"}):
        texts = []
        for model in (parts[0], whole):
            with outpace.load(str(model), method="autoregressive", profile=False, **options) as llm:
                texts.append(llm.generate("hello world", max_tokens=20, ignore_eos=True)[0].tokens)
        assert texts[0] == texts[1]


def test_a_changed_part_is_converted_again(parts: list[Path], tmp_path: Path) -> None:
    before = resolve(str(parts[0]), cache=tmp_path / "cache")
    assert resolve(str(parts[0]), cache=tmp_path / "cache") == before
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert resolve(str(parts[0]), cache=tmp_path / "cache") != before


def test_errors_name_the_part(parts: list[Path], tmp_path: Path) -> None:
    def refused(words: str, path: Path = parts[0]) -> None:
        with pytest.raises(UserError, match=words):
            GgufCheckpoint(path)

    first, second = parts[:2]
    refused(f"is part 2 of {len(parts)}: name the first one, .*{first.name}", second)
    held = second.read_bytes()
    shutil.copyfile(parts[2], second)
    refused(f"{second.name} does not belong to .*: it has split.no 2 and split.count")
    second.write_bytes(held[: len(held) // 2])
    refused(f"{second.name} is truncated")
    second.write_text("no model")
    refused(f"{second.name} is not a GGUF file")
    second.unlink()
    refused(f"{second.name} is missing: .* is the first of {len(parts)} parts")
    renamed = first.rename(tmp_path / "renamed.gguf")
    refused("so the first one's name must end in", renamed)


def test_parts_of_two_models_are_refused(parts: list[Path], tmp_path: Path) -> None:
    """They differ in the number of tensors, and share one tensor."""
    fewer = {name: values for name, values in weights().items() if "layers.1" not in name}
    (tmp_path / "other").mkdir()
    other = write_gguf(tmp_path / "other" / "tiny.gguf", kind="Q8_0", split=-(-len(fewer) // len(parts)), tensors=fewer)
    others = part_files(other)
    assert len(others) == len(parts)
    shutil.copyfile(others[-1], parts[-1])
    with pytest.raises(UserError, match=r"split.tensors.count is|so does another part"):
        GgufCheckpoint(parts[0])


@pytest.mark.parametrize("options", [{"runtime": "auto"}, {"dtype": "int8"}, {"runtime": "llama"}], ids=str)
def test_damage_names_the_part(parts: list[Path], options: dict[str, str]) -> None:
    with GgufCheckpoint(parts[0]) as source:
        name = next(name for name in source.names() if source.file_of(name) == parts[2] and "proj" in name)
        entry = source._entry(name)
    data = bytearray(parts[2].read_bytes())
    data[entry.start + 1] = 0x7C  # an infinite scale
    parts[2].write_bytes(data)
    with pytest.raises(UserError, match=f"{parts[2].name} is damaged: tensor .* not finite"):
        outpace.load(str(parts[0]), method="autoregressive", profile=False, **options)


def test_names_of_parts() -> None:
    assert part_files(Path("x/a-00002-of-00003.gguf")) == [Path(f"x/a-0000{n}-of-00003.gguf") for n in (1, 2, 3)]
    for name in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-2-of-3.gguf", "-00001-of-00002.gguf"):
        assert part_files(Path(name)) == [Path(name)]


def test_the_hub_downloads_all_parts() -> None:
    name, three = HubName("owner/name"), [f"sub/name-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    both = [*three, "name-Q8_0.gguf"]
    assert choose_files(name, [*three, "README.md"]) == three
    for wanted, files in (("q4_k_m", three), (three[0], three), ("q8_0", ["name-Q8_0.gguf"])):
        assert choose_files(replace(name, file=wanted), both) == files
    with pytest.raises(UserError, match="several GGUF files"):
        choose_files(name, both)
    with pytest.raises(UserError, match=r"holds sub/name.*00001.* and no sub/name.*00002-of-00003.gguf"):
        choose_files(name, [three[0], three[2]])
