"""The kinds of trained heads, how config.json and the names of tensors identify them, and the configuration of one.

EAGLE-1: Li et al., arXiv:2401.15077; EAGLE-3: arXiv:2503.01840. P-EAGLE: the same, with mask slots that draft in
parallel. DFlash: a block of mask tokens that attends to the target's hidden states. DSpark: DFlash with a Markov bias,
arXiv:2607.05147. Medusa: further output layers, arXiv:2401.10774. SpecFormer: slots that attend to each other,
arXiv:2511.20340.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outpace.core import registry
from outpace.core.errors import UserError
from outpace.models.llama.config import qwen35
from outpace.models.llama.config.llama_config import LlamaConfig

EAGLE3, EAGLE4, P_EAGLE, DFLASH, DSPARK = "EAGLE-3", "EAGLE-4", "P-EAGLE", "DFlash", "DSpark"
EAGLE1, MEDUSA, SPECFORMER = "EAGLE-1", "Medusa", "SpecFormer"
MIMO_MTP, QWEN_MTP = "MTP of MiMo", "MTP of Qwen3.5"
MTP_LAYERS = (MIMO_MTP, QWEN_MTP)  # kinds in the files of their targets
FILES = {  # the file in `kinds` that has the class of a kind; that of any other kind has its name
    **dict.fromkeys((EAGLE3, P_EAGLE), "features"),
    **dict.fromkeys((DFLASH, DSPARK), "block"),
    **dict.fromkeys((EAGLE1, *MTP_LAYERS), "features"),
    MEDUSA: "medusa",
    SPECFORMER: "slots",
}
SPECULATORS = {  # speculators_model_type: the kind
    "eagle3": EAGLE3,
    "peagle": P_EAGLE,
    "dflash": DFLASH,
    "dflash2": "DFlash2",
    "dspark": DSPARK,
    "mtp": "MTP",
    "eagle": EAGLE1,
    "mlp": "MLP speculator",
    "specformer": SPECFORMER,
}
ARCHITECTURES = (  # a part of architectures[0] in lower case, and the kind; the first match counts
    ("eagle4", EAGLE4),
    ("peagle", P_EAGLE),
    ("eagle3", EAGLE3),
    ("domino", "Domino"),
    ("dspark", DSPARK),
    ("xpress", "XPress"),
    ("lilicorr", "LiLiCorr"),
    ("dflash", DFLASH),
    ("eagle", EAGLE1),
    ("medusa", MEDUSA),
    ("specformer", SPECFORMER),
    *((kind.lower(), kind) for kind in MTP_LAYERS),
)
STEERING = "steering.safetensors"  # in the folder of a draft model that the target's hidden states steer
FIELDS = (("dflash_config", DFLASH), ("medusa_num_heads", MEDUSA))  # field of config.json, and kind


@dataclass(frozen=True)
class HeadConfig:
    """The architecture of a head.

    Attributes:
        kind: name of the method, as in SPECULATORS.
        layers: its decoder layers, with the target's vocabulary.
        taps: the target's hidden states that it reads, in the order of concatenation: each is the number of layers
            after which the state is taken.
        num_rows: number of rows of its output layer.
        target_width: size of the target's hidden states.
        target_eps: added to the mean square in the target's final norm.
        norm_before_residual: whether the residual of the first layer is the normed feature.
        norm_before_fc: whether the concatenated hidden states are normed before `fc`.
        fc_norm: whether each hidden state is normed before `fc`.
        norm_output: whether the output that the next draft step reads is normed.
        has_fc_bias: whether `fc` has a bias.
        logit_scale: factor by which the logits are multiplied.
        verifier: the target that it was trained for; None if the file does not say.
        draft_length: draft length that the file recommends; None if it does not say.
        mask_token: token of the slots that a head drafts in parallel; None if it drafts one token at a time.
        block: number of slots of a block or of SpecFormer, or of Medusa's heads; 0 for heads that do not draft in
            blocks.
        from_anchor: whether each slot predicts the token after it, from the slot of the last written token on;
            otherwise each mask slot predicts the token at its own position, and the first slot nothing.
        causal: for each layer, whether a slot of a block does not attend to later ones.
        markov: how a block's logits depend on the preceding token: one of `MARKOV_KINDS`; None if they do not.
        notices: sentences for users: what the files leave out and was assumed, and fields that were ignored.
    """

    kind: str
    layers: LlamaConfig
    taps: tuple[int, ...]
    num_rows: int
    target_width: int
    target_eps: float = 1e-6
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_fc_bias: bool = False
    logit_scale: float = 1.0
    verifier: str | None = None
    draft_length: int | None = None
    mask_token: int | None = None
    block: int = 0
    from_anchor: bool = False
    causal: tuple[bool, ...] = ()
    markov: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def layer_config(self) -> LlamaConfig:
        """The layers as a runtime builds them."""
        return replace(self.layers, causal_layers=self.causal)

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block if self.from_anchor else self.block - 1


def head_kind(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Return the kind of head that a config.json, and the names of the tensors if they are known, describe; None for
    anything else.

    A kind that no table here lists is known by its file's name, in the architecture or as the type of speculators, or
    by a field of its own.
    """
    kind, others = _listed_kind(config, names), [name for name in registry.names("heads") if name not in FILES.values()]
    listed = config.get("architectures")
    said = f"{listed[0] if isinstance(listed, list) and listed else ''} {config.get('speculators_model_type')}".lower()
    named = [name for name in others if name in said]
    if not named and kind is not None:
        nested = [value for value in config.values() if isinstance(value, Mapping)]
        held = {field for fields in (config, *nested) for field in fields}
        named = [name for name in others if held.intersection(head_class(name).own_fields)]
    return named[0] if named else kind


def head_class(kind: str) -> Any:
    """Return the class that runs a kind of head."""
    module = registry.find("heads", FILES.get(kind, kind))
    return next(one for one in vars(module).values() if kind in getattr(one, "kinds", ()))


def _listed_kind(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    kind = config.get("speculators_model_type")
    if isinstance(kind, str):
        return SPECULATORS.get(kind, kind)
    if "mask_hidden" in names:  # the architecture may be EAGLE-3's
        return P_EAGLE
    listed = config.get("architectures")
    name = str(listed[0]).lower() if isinstance(listed, list) and listed else ""
    nested = config.get("dflash_config")
    projector = (nested if isinstance(nested, Mapping) else config).get("projector_type", config.get("projector_type"))
    for part, kind in ARCHITECTURES:
        if part in name or part == projector:
            return kind
    if "selector_rank" in config:
        return "DFlash2"
    for field, kind in FIELDS:
        if field in config:
            return kind
    is_single = config.get("num_hidden_layers") == 1
    if is_single and "draft_vocab_size" in config:
        return EAGLE3
    if "fc.weight" in names:
        return EAGLE3 if "layers.0.hidden_norm.weight" in names else EAGLE1
    return None


def kind_of_mtp(config: Mapping[str, Any]) -> str | None:
    """Return the kind of MTP layer that a target's config.json announces in its files; None without a supported one."""
    match dict(config):
        case {"model_type": "mimo", "num_nextn_predict_layers": int(count)} if count > 0 and "outpace" not in config:
            return MIMO_MTP  # unless it is a draft that outpace distilled from one
        case {"model_type": qwen35.MODEL_TYPE | qwen35.MOE_TYPE | qwen35.NEXT_TYPE, qwen35.MTP_LAYERS: 1}:
            return QWEN_MTP
        case {"model_type": qwen35.NEXT_TYPE} if config.get(qwen35.MTP_LAYERS) is None:
            return QWEN_MTP  # some configs of Qwen3-Next do not announce it
    return None


def check_kind(kind: str, where: object) -> None:
    """Raise UserError for a kind of head that is not supported; `where` is its file or folder."""
    if kind == EAGLE4:
        raise UserError(
            f"{where} is an EAGLE-4 head, whose licence forbids other implementations: outpace does not run it; use a"
            " head of another kind or a draft model"
        )
    if kind not in FILES and kind not in registry.names("heads"):
        *others, last = FILES
        raise UserError(
            f"{where} is a trained head ({kind}) that is not supported yet: outpace runs {', '.join(others)} and {last}"
            " heads, and draft models"
        )


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """Return the target that a head in the format of speculators names; None if it names none."""
    verifier = verifier_fields(config).get("name_or_path")
    return verifier if isinstance(verifier, str) and verifier else None


def fields_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object in a field, empty if the field is missing or null; raise UserError for anything else."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise UserError(f"{name} is {found!r:.80}, it must be an object")
    return found or {}


def verifier_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields about the target that a head in the format of speculators was trained for."""
    return fields_of(fields_of(config, "speculators_config"), "verifier")
