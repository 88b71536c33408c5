"""Tiny random encoder-decoder models of transformers, their folders, and one that copies its source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from passes import text
from torch import Tensor

from outpace.models.base import chain

PAD, BOS, EOS = 0, 1, 2
SIZES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
    "decoder_start_token_id": PAD,
}
RELATIVE: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": PAD,
    "n_positions": 16,  # which says nothing about relative positions
}
FIELDS = {
    "t5": RELATIVE | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": RELATIVE,
    "umt5": RELATIVE,
    "longt5": RELATIVE | {"local_radius": 3},
    "bart": SIZES | {"decoder_start_token_id": EOS},
    "marian": SIZES | {"scale_embedding": True, "tie_word_embeddings": False},  # the texts vary more
    "mbart": SIZES,
    "mvp": SIZES,
    "pegasus": SIZES,
    "plbart": SIZES,
}
SINUSOIDAL = ("marian", "pegasus")  # fixed positions, which are not saved
GENERATION: dict[str, dict[str, Any]] = {  # as published checkpoints have them
    "bart": {"forced_bos_token_id": BOS, "forced_eos_token_id": EOS},
    "marian": {"bad_words_ids": [[PAD]], "forced_eos_token_id": EOS},
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose scores depend visibly on the whole source, on positions and on every token before."""
    ids = {"vocab_size": tiny.VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = transformers.AutoConfig.for_model(name, **ids | FIELDS[name] | changes)
    torch.manual_seed(seed)
    module = transformers.AutoModelForSeq2SeqLM.from_config(config)
    for parameter, weight in module.named_parameters():
        if weight.dim() > 1 and not (name in SINUSOIDAL and "embed_positions" in parameter):
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[-1] ** 0.5)
    for field, value in GENERATION.get(name, {}).items():
        setattr(module.generation_config, field, value)
    return module.eval()


def folder(where: Path, name: str, seed: int = 0, module: Any = None, **changes: Any) -> Path:
    """A model with the tokenizer of `files`, which ends a source as T5's does; without a chat template."""
    path = tiny.folder(where, name, seed, module or build(name, seed, **changes))
    file = path / "tokenizer.json"
    fields = json.loads(file.read_text())
    end = {"id": "</s>", "ids": [EOS], "tokens": [fields["added_tokens"][EOS]["content"]]}
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"</s>": end}}
    file.write_text(json.dumps(fields | {"post_processor": processor}))
    settings = path / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    kept.pop("chat_template", None)
    settings.write_text(json.dumps(kept))
    return path


def copying(seed: int = 0, positions: int = 96) -> Any:
    """A BART whose decoder writes its source again.

    All its embeddings are random. A token's fills the first half of a vector and a position's the second; the
    cross-attention compares the second halves, so the decoder's position i sees the source's token i, and adds its
    first half. Everything else of its layers is zero.
    """
    width = 256
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": width, "max_position_embeddings": positions}
    module = build("bart", seed, **sizes | {"encoder_attention_heads": 1, "decoder_attention_heads": 1})
    half = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)])
    with torch.no_grad():
        model = module.model
        for layer in (*model.encoder.layers, *model.decoder.layers):
            for name, weight in layer.named_parameters():
                if "norm" not in name:
                    weight.zero_()
        torch.nn.init.normal_(model.shared.weight)
        model.shared.weight.mul_(half)
        torch.nn.init.normal_(model.decoder.embed_positions.weight)
        model.decoder.embed_positions.weight.mul_(1 - half)
        model.encoder.embed_positions.weight.copy_(model.decoder.embed_positions.weight)
        attention = model.decoder.layers[0].encoder_attn
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.copy_(torch.diag(1 - half) * 2)
        attention.v_proj.weight.copy_(torch.diag(half) * 9)  # beyond what the token before adds
        attention.out_proj.weight.copy_(torch.eye(width))
    return module


def fresh(model: Any, source: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Transformers' own logits after the decoder's start and `tokens`, without a cache."""
    inputs = {"input_ids": torch.tensor([list(source)])}
    inputs["decoder_input_ids"] = torch.tensor([[*model.decoder_start, *tokens]])
    with torch.inference_mode():
        return model.module(**inputs, use_cache=False).logits[0, -1]


def opened(model: Any, source: Sequence[int], room: int = 60) -> Any:
    """A session for a source that it has not read."""
    session = model.open(len(source) + 60, room)
    session.source_length = len(source)
    return session


def prefilled(model: Any, source: Sequence[int], tokens: Sequence[int] = ()) -> Any:
    """A session that has read the source, the decoder's start and `tokens`."""
    session = opened(model, source)
    known = [*source, *model.decoder_start, *tokens]
    model.score([chain(session, known)])
    session.keep(range(len(known)))
    return session


def generated(module: Any, source: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    """What transformers' greedy `generate` writes after the decoder's start, a forced first token left out."""
    forced = module.generation_config.forced_bos_token_id is not None
    given = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_tokens + forced, **options}
    return module.generate(torch.tensor([list(source)]), **given)[0].tolist()[1 + forced :]


def sources(model: Any, *lengths: int) -> list[list[int]]:
    """Random sources of these lengths."""
    return [[token % 250 + 8 for token in text(model, length, number)] for number, length in enumerate(lengths)]
