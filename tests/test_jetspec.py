"""JetSpec: the kind and its fields, and a tree that grows below its best node. `test_head_kinds.py` has the rest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_heads import BLOCK, JETSPEC, write_block
from files import model_folder
from heads import LAYERS

from outpace.core.drafting import UNRESTRICTED
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.tree import TokenTree
from outpace.core.types import Request
from outpace.drafters._model_drafter import ChildAdder, OfferState
from outpace.drafters._tree_expander import ExpansionJob
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded
from outpace.rules.greedy import Greedy


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(model_folder(tmp_path_factory.mktemp("jetspec"), "target", num_hidden_layers=LAYERS))


@pytest.mark.parametrize(
    ("changes", "causal", "block"),
    [
        ({"dflash_config": JETSPEC}, True, BLOCK),
        ({"dflash_config": JETSPEC | {"draft_shift": True}}, True, BLOCK - 1),
        ({"dflash_config": JETSPEC | {"causal_head": False}}, False, BLOCK),
        ({"architectures": ["JetSpecDraftModel"]}, True, BLOCK),
    ],
)
def test_a_head_is_known_by_its_field_or_its_name(
    changes: dict[str, Any], causal: bool, block: int, target: Loaded, tmp_path: Path
) -> None:
    head = load_draft(write_block(tmp_path / "head", **changes), target, dtype="int8")
    spec = head.model.spec
    assert (spec.kind, head.drafter, spec.causal, spec.block) == ("jetspec", "block", (causal, causal), block)
    assert spec.num_drafted == BLOCK - 1


def test_contradictions_are_refused(target: Loaded, tmp_path: Path) -> None:
    path = write_block(tmp_path / "head", dflash_config=JETSPEC, causal_head=False)
    with pytest.raises(UserError, match=r"causal_head is False, but dflash_config\.causal_head is True"):
        load_draft(path, target)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_tree_has_the_best_paths(width: int) -> None:
    """Expanding the best node each time gives the same as picking from the product of all slots, and no level has to be
    wide."""
    random, vocab, depths = np.random.default_rng(width), 6, 4
    log_q = np.log(random.dirichlet(np.ones(vocab) * 0.3, depths))
    state = OfferState(Request((1, 2), Greedy(), 20))
    state.directives = UNRESTRICTED
    tree = TokenTree(2)

    def logits_of(job: int, depth: int, nodes: Any) -> SparseLogits:
        return SparseLogits(log_q[[depth] * len(nodes)].astype(np.float32), None, vocab)

    ChildAdder(width, 256, "1").add_best_first([ExpansionJob(state, tree, [0])], depths, logits_of)
    parents = sorted(set(tree.parents[1:]))
    assert len(parents) == depths * width
    expanded = {tuple(tree.path_tokens(node)) for node in parents}
    every = [path for length in range(depths) for path in itertools.product(range(vocab), repeat=length)]
    scores = {path: sum(log_q[slot, token] for slot, token in enumerate(path)) for path in every}
    offered = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
    best = sorted((path for path in every if path in offered), key=lambda path: -scores[path])[: depths * width]
    assert expanded == set(best)
