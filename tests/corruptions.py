"""Damaged model files by number: each number names one damage, always the same."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

from files import model_folder, split_weights, write_gguf

from outpace.models.files.checkpoint import INDEX

NUMBERS = [0, 1, 2, 7, 127, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**60, 2**63, 2**64 - 1]
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
JUNK: list[Any] = [
    None,
    True,
    False,
    *(-1, 0, 1, 3, 65, 2**31 - 1, 2**60, -(2**63), 10**400),
    *(0.0, 0.5, 1e-300, 1e308, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "\ud800", "é" * 100_000, "{{ 1 // 0 }}", "(a+)+$"),
    *([], {}, [1] * 1000, [[]], {"a": {}}, {"type": "BPE"}, DEEP),
]
FIELDS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
OTHER_FIELDS = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "rope.scaling.factor")
TOKENIZER_FIELDS = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token")
GGUF_JUNK: list[Any] = [
    *(0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**32 - 1),
    *(0.0, -1.0, 0.5, 1e30, float("nan"), float("inf")),
    *(True, "", "x", "gemma3", "yarn", [1, 2], ["a"], [0.5] * 272, ["a"] * 272, [3] * 272),
]


class Touch:
    """Creates a file when unpickled: proof that something was executed."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.canary, "w")


class Damage:
    """A folder to damage models in; `case(number)` gives the path of damaged model `number`, and a word on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder, folder / "executed"
        self.gguf = write_gguf(folder / "tiny.gguf", kind="Q8_0").read_bytes()
        self.plain, self.sharded = model_folder(folder, "plain"), folder / "sharded"
        shutil.copytree(self.plain, self.sharded)
        split_weights(self.sharded)

    def case(self, number: int) -> tuple[Path, str]:
        """Damaged model `number`; what an earlier case left is removed."""
        chance = random.Random(number)
        shutil.rmtree(self.folder / "case", ignore_errors=True)
        (self.folder / "case").mkdir()
        if number % 5 < 2:
            path = self.folder / "case" / f"tiny{number}.gguf"
            return path, self._gguf(path, chance)
        path = self.folder / "case" / "model"
        shutil.copytree(self.sharded if number % 5 == 2 else self.plain, path)
        often = (".safetensors", "tokenizer.json", "/config.json", INDEX)
        files = sorted(path.iterdir())
        file = chance.choice([file for file in files for _ in range(3 if str(file).endswith(often) else 1)])
        own = [self._json] * 5 if file.suffix == ".json" else [self._header] * 4
        damage = chance.choice([self._bytes, self._bytes, self._node, *own])
        return path, f"{file.name}: {damage(file, chance)}"

    def _gguf(self, path: Path, chance: random.Random) -> str:
        kind = chance.choice([*["field", "number"] * 4, *["bytes"] * 3, *["twice", "values", "architecture"]])
        if kind == "architecture":
            named = chance.choice(["qwen2", "qwen3", "smollm3", "gemma3", "", "é"])
            write_gguf(path, architecture=named)
            return named
        if kind == "field":
            names = [f"llama.{name}" for name in FIELDS + OTHER_FIELDS]
            field = chance.choice([*names, *(f"tokenizer.ggml.{name}" for name in TOKENIZER_FIELDS)])
            value = chance.choice([*GGUF_JUNK, None])
            write_gguf(path, {field: value})
            return f"{field} = {value!r:.40}"
        path.write_bytes(self.gguf)
        end = self.gguf.rindex(b"blk.") + 100
        if kind == "bytes":
            return self._bytes(path, chance)
        data = bytearray(self.gguf)
        place, size = chance.randrange(4, end), chance.choice([4, 8])
        if kind == "number":
            value = chance.choice(NUMBERS) % 2 ** (8 * size)
            data[place : place + size] = value.to_bytes(size, "little")
        elif kind == "twice":
            old, new = chance.choice([(b"attn_q", b"attn_k"), (b"blk.1", b"blk.0"), (b"bos_token", b"eos_token")])
            data = bytearray(self.gguf.replace(old, new, 1))
        else:
            start = len(data) - 50_000
            data[start:] = chance.choice([b"\xff", b"\x00", b"\x7c"]) * 50_000
        path.write_bytes(data)
        return f"{kind} at {place}"

    def _bytes(self, file: Path, chance: random.Random) -> str:
        data = bytearray(file.read_bytes())
        place = chance.randrange(min(len(data), chance.choice([16, 2000, len(data)])))
        kind = chance.choice(["flip", "flip", "cut", "more", "less", "pickle", "zip", "empty"])
        if kind == "flip":
            for _ in range(chance.randint(1, 8)):
                data[chance.randrange(place, min(len(data), place + 40))] = chance.choice([0, 127, 255, 34, 123, 48])
        elif kind == "cut":
            del data[place:]
        elif kind == "more":
            data[place:place] = chance.randbytes(chance.choice([1, 8, 10_000]))
        elif kind == "less":
            del data[place : place + chance.choice([1, 8, 1000])]
        elif kind == "pickle":
            data[:] = pickle.dumps(Touch(str(self.canary)))
        elif kind == "zip":
            with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:  # as torch.save writes it
                archive.writestr("archive/data.pkl", pickle.dumps(Touch(str(self.canary))))
            data[:] = stream.getvalue()
        else:
            data.clear()
        file.write_bytes(data)
        return f"{kind} at {place}"

    def _node(self, file: Path, chance: random.Random) -> str:
        """Replace the file by something else of the same name."""
        kind = chance.choice(["nothing", "folder", "loop", "dangling", "pipe", "device", "large"])
        links = {"loop": file.name, "dangling": "none", "device": "/dev/zero"}
        file.unlink()
        if kind in links:
            file.symlink_to(links[kind])
        elif kind == "folder":
            file.mkdir()
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "large":
            with file.open("wb") as stream:
                stream.truncate(2**40)  # a sparse file takes no space
        return kind

    def _json(self, file: Path, chance: random.Random) -> str:
        value = json.loads(file.read_text())
        kind = chance.choice(["junk", "junk", "junk", "gone", "twice", "deep", "digits", "other"])
        (place, key), junk = _place(value, chance), chance.choice(JUNK)
        if kind == "junk":
            place[key] = junk
        elif kind == "gone":
            del place[key]
        elif kind == "other" and isinstance(place, dict):
            place[f"{key}x"] = place.pop(key)
        text = json.dumps(value)
        if kind == "twice":
            text = text[:-1] + ", " + json.dumps({str(key): junk})[1:]
        elif kind == "deep":
            text = text[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"
        elif kind == "digits":
            text = text[:-1] + ', "vocab_size": ' + "9" * chance.choice([10, 4000, 100_000]) + "}"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        return f"{kind} {key!r}" + (f" = {junk!r:.30}" if kind == "junk" else "")

    def _header(self, file: Path, chance: random.Random) -> str:
        """Damage a safetensors header."""
        data = file.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        kind = chance.choice(["length", "offsets", "shape", "dtype", "metadata", "twice", "nan", "deep", "overlap"])
        if kind == "length":
            file.write_bytes(struct.pack("<Q", chance.choice(NUMBERS)) + data[8:])
            return kind
        if kind == "nan":
            file.write_bytes(data[:-64] + struct.pack("<f", float("nan")) * 16)
            return kind
        table = json.loads(data[8 : 8 + length])
        names = [name for name in table if name != "__metadata__"]
        entry = table[chance.choice(names)]
        if kind == "offsets":
            entry["data_offsets"] = chance.choice([[0, 2**60], [-1, 5], [256, 0], [float("nan"), 1], [0], "x", [0, 0]])
        elif kind == "overlap":
            entry["data_offsets"] = table[chance.choice(names)]["data_offsets"]
        elif kind == "shape":
            entry["shape"] = chance.choice([[2**60], [-1], [], [0], [2**32, 2**32], [1.5], ["x"], [1] * 50, None, DEEP])
        elif kind == "dtype":
            entry["dtype"] = chance.choice(["F16", "F64", "I8", "F8_E4M3", "BOOL", "", None, 3])
        elif kind == "metadata":
            table["__metadata__"] = chance.choice([[], {"a": 1}, {"format": "tf"}, "x", {"format": DEEP}])
        head = json.dumps(table)
        if kind == "twice":
            head = head[:-1] + ", " + json.dumps({names[0]: table[names[-1]]})[1:]
        elif kind == "deep":
            head = head[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"
        file.write_bytes(struct.pack("<Q", len(head.encode())) + head.encode() + data[8 + length :])
        return kind


def _place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """A place in a JSON value that can be changed: at each level one key, and there the value or further inside."""
    while True:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.3:
            return value, key
        value = inner
