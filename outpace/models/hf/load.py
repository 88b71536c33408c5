"""Loads models and tokenizers with transformers, or wraps loaded ones; errors become one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from outpace.core.errors import UserError
from outpace.models.files.checkpoint import ORIGINAL
from outpace.models.files.model_kind import check_language_model, is_encoder_decoder
from outpace.models.files.tokenizer_folder import SPECIAL_NAMES, named_templates
from outpace.models.hf.encoder_decoder import EncoderDecoderModel, EncoderDecoderPasses
from outpace.models.hf.model import TransformersModel, probe
from outpace.models.hf.passes import ForwardPasses
from outpace.models.options import LoadOptions
from outpace.models.text.text_stream import TextStream, WindowStream
from outpace.models.text.tokenizer import Tokenizer


def load(source: str | Path, revision: str | None, options: LoadOptions) -> tuple[TransformersModel, Tokenizer]:
    """Load the model and tokenizer of a folder, or of a hub id's `revision`. UserError for anything that does not
    load."""
    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "revision": revision or "main"}
    with _explained(str(source)):
        fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision or "main")
    tokenizer = _load_tokenizer(source, fields, common)
    kind: Any = AutoModelForSeq2SeqLM if is_encoder_decoder(fields) else AutoModelForCausalLM
    given = common | {"dtype": options.torch_dtype, "output_loading_info": True, "device_map": options.device_map}
    with _explained(str(source)), without_bars():
        module, info = kind.from_pretrained(source, **given)
        if options.device_map is None and not getattr(module, "is_quantized", False):
            module.to(options.device)
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them randomly
        raise UserError(f"{source} lacks {len(missing)} of the model's weights, the first is {missing[0]}")
    ignored, is_known = sorted(info["unexpected_keys"]), getattr(module, "is_quantized", False)
    if ignored and not is_known and getattr(module.config, "quantization_config", None):
        said = f"it would ignore {len(ignored)} tensors, the first is {ignored[0]}"
        raise UserError(f"{source} is quantised in a way that transformers does not know: {said}; {ORIGINAL}")
    return wrap_pair(module, tokenizer)


def _load_tokenizer(source: str | Path, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Load a tokenizer; that of a Marian model from its tokenizer.json, because its class reads other files."""
    if fields.get("model_type") != "marian":
        with _explained(f"the tokenizer of {source}"):
            return AutoTokenizer.from_pretrained(source, **options)
    try:
        return PreTrainedTokenizerFast.from_pretrained(source, **options)
    except Exception as error:  # of many kinds
        advice = "its source.spm and target.spm are not read: name a repository with one, as for transformers.js"
        raise UserError(f"{source} is a Marian model without a tokenizer.json that loads, {advice}") from error


def wrap_pair(module: Any, tokenizer: Any) -> tuple[TransformersModel, Tokenizer]:
    """Wrap a loaded model and its tokenizer. UserError without a tokenizer, or for objects of other types."""
    if tokenizer is None:
        raise UserError("a loaded model needs its tokenizer, give tokenizer=...")
    if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
        check_language_model(config.to_dict() | {"architectures": [type(module).__name__]}, "the loaded model")
    return adapt(module), wrap_tokenizer(tokenizer, _stop_ids(module))


def adapt(module: Any) -> TransformersModel:
    """Wrap a loaded model after probing what it supports. UserError for a model without token scores, that is not
    causal, or that cannot remove a drafted token."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        coupled = EncoderDecoderPasses(module)
        return EncoderDecoderModel(coupled, probe(coupled))
    passes = ForwardPasses(module)
    return TransformersModel(passes, probe(passes))


def _stop_ids(module: Any) -> list[int]:
    """Return the ids that end an answer: the generation config's, else the model's."""
    for config in (getattr(module, "generation_config", None), module.config):
        named = getattr(config, "eos_token_id", None)
        if named is not None:
            return list(named) if isinstance(named, list) else [named]
    return []


class PythonBackend:
    """The methods of `tokenizers.Tokenizer` that outpace calls, implemented with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._tokens = {index: token for token, index in self._ids.items()}

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [index for index in ids if index in self._tokens]
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(known, **options))

    def no_truncation(self) -> None:
        """Do nothing: `encode` does not truncate."""

    def no_padding(self) -> None:
        """Do nothing: `encode` does not pad."""

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, index: int) -> str | None:
        return self._tokens.get(index)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._ids

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self._tokenizer.added_tokens_decoder)


class SlowTokenizer(Tokenizer):
    """A tokenizer written in Python, or whose decoder `text_stream` does not support: slower, with the same text."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        super().__init__(PythonBackend(tokenizer), _special(tokenizer), stop_ids, _templates(tokenizer))

    @cached_property
    def _anchor(self) -> list[int]:
        return self.continuation("a")[-1:]

    def _stream_factory(self) -> Callable[[bool], TextStream]:
        return lambda skip_special: WindowStream(partial(self.decode, skip_special=skip_special))

    def spelled(self, token: int) -> bytes:
        return self.decode([token], skip_special=False).encode()

    def _added_bytes(self, token: int) -> bytes:
        """Return what the token adds to another one's text, because decoders join tokens by their own rules.

        Partial characters are U+FFFD here, so a ban does not see characters that such a tokenizer splits.
        """
        alone, both = self.decode(self._anchor), self.decode([*self._anchor, token])
        return (both[len(alone) :] if both.startswith(alone) else self.decode([token])).encode()


def wrap_tokenizer(tokenizer: Any, stop_ids: Sequence[int]) -> Tokenizer:
    """Wrap the tokenizer, without changing it; `stop_ids` end an answer in addition to its own."""
    import tokenizers

    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not hasattr(tokenizer, "get_vocab") or not hasattr(tokenizer, "all_special_ids"):
        raise UserError(f"{type(tokenizer).__name__} is not a tokenizer of transformers, AutoTokenizer gives one")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        try:
            return Tokenizer(copy, _special(tokenizer), stop_ids, _templates(tokenizer))
        except UserError:  # a decoder that text_stream does not support
            pass
    return SlowTokenizer(tokenizer, stop_ids)


def _special(tokenizer: Any) -> dict[str, str]:
    found = {name: getattr(tokenizer, name, None) for name in SPECIAL_NAMES}
    return {name: str(text) for name, text in found.items() if text is not None}


def _templates(tokenizer: Any) -> dict[str, str]:
    return named_templates(getattr(tokenizer, "chat_template", None))


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' own progress bars."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the many exceptions that transformers raises for bad files and options into UserError.

    Three cases are recognised by their text, as transformers raises plain ValueErrors and ImportErrors for them.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        if "trust_remote_code" in text:
            reason = "brings its own Python code, which runs only with --trust-remote-code"
            raise UserError(f"{what} {reason} (trust_remote_code=True)") from error
        if "accelerate" in text:
            raise UserError(f"{what} is to be spread by a device map, which needs `pip install accelerate`") from error
        if "Unrecognized configuration class" in text:
            raise UserError(f"{what} is no causal language model that transformers knows") from error
        first = text.strip().partition("\n")[0]
        raise UserError(f"{what} cannot be loaded by transformers ({type(error).__name__}: {first})") from error
