"""Mistakes in recurrent layers, in their walk through trees and in gated attention."""

from __future__ import annotations

from mutation import Mutation

RECURRENT = (
    Mutation(
        "accepted nodes are folded in another order",
        "states.cpp",
        "for (int node : path) folds_.push_back(pending_[node]);",
        "for (int node : path) folds_.insert(folds_.begin(), pending_[node]);",
    ),
    Mutation(
        "a state is written before its nodes are accepted",
        "walk.cpp",
        "is_last && from != kCommitted ? from : free",
        "is_last ? from : free",
    ),
    Mutation(
        "a branch takes over a state that another still needs",
        "walk.cpp",
        "child == inner.back()",
        "child == inner.front()",
    ),
    Mutation(
        "a filter reads the row of a sibling",
        "pass.cpp",
        "scratch_.earlier.push_back(places[other])",
        "scratch_.earlier.push_back(places[own - found])",
    ),
    Mutation(
        "a filter reads committed rows in another order", "pass.cpp", "push_back(found - 1 - n)", "push_back(n - kept)"
    ),
    Mutation(
        "value heads in the order of another file",
        "recurrence.h",
        "is_tiled ? number * key_heads + key_head : key_head",
        "false ? 0 : key_head",
    ),
    Mutation("accepted nodes are folded twice", "model.cpp", "span.store->states()->end_folds();", ";"),
    Mutation("the history takes one accepted row", "recurrent.h", "row + sequence.folds", "row + 1"),
    Mutation(
        "a skipped layer folds nothing",
        "pass.cpp",
        "        if (model_.layers_[number]->recurrent)\n            run",
        "        if (model_.layers_[number]->recurrent && skips(number, 0)) continue;\n"
        "        if (model_.layers_[number]->recurrent)\n            run",
    ),
    Mutation(
        "nodes of an earlier pass are not walked again",
        "pass.cpp",
        "tree.parents[child] = other;",
        "if (other >= first_new) tree.parents[child] = other; else if (child >= first_new) tree.parents[child] = -1;",
    ),
    Mutation("a delta without its strength", "recurrent.h", "value) * Floats::all(row.strength)", "value)"),
    Mutation(
        "an output without its own token",
        "recurrent.h",
        "fma(Floats::all(row.match), delta, by_query",
        "fma(Floats::all(0.0f), delta, by_query",
    ),
    Mutation("a state does not decay", "recurrent.h", "entries * Floats::all(node.decay))", "entries)"),
    Mutation(
        "nodes that are folded together are folded in another order",
        "recurrent.h",
        "const Fold& node = nodes[n];",
        "const Fold& node = nodes[Folds - 1 - n];",
    ),
    Mutation(
        "strengths ignore that inputs are rounded for all",
        "pass.cpp",
        "in.by_quarters && (!more || layer.strengths->takes_quarters())",
        "in.by_quarters",
    ),
    Mutation("attention without its gates", "attention.h", "if (heads.is_gated)", "if (false)"),
    Mutation(
        "the gates of the first head for all",
        "attention.h",
        "heads.gates_at() + head * heads.depth",
        "heads.gates_at()",
    ),
    Mutation("a state is saved without its last nodes", "states.cpp", "if (!folds_.empty()) throw", "if (false) throw"),
    Mutation("states do not know the pending nodes", "model.cpp", "span.pending == pending", "true"),
)
