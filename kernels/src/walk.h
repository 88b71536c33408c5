// The order in which a pass goes through the recurrent states of a tree.
#pragma once

#include <vector>

#include "recurrence.h"

namespace outpace {

/// A session's pending nodes in a pass; numbers from `first_new` on are the pass's rows from `first_row` on.
struct WalkedTree {
    std::vector<int> parents;  // of each node; -1: the committed text, kUnused: not an ancestor of a row
    int first_new;
    int first_row;
};

constexpr int kUnused = -2;

/// Appends the steps that take in the nodes at the places `folds`, then compute all rows, depth first. `places`: of each
/// node. Only nodes with children get a state; the largest branch comes last, and takes its parent's state over. Returns
/// the number of states that exist at once besides the committed one.
int add_walk(const WalkedTree& tree, const std::vector<int>& places, const std::vector<int>& folds,
             std::vector<WalkStep>& steps);

}  // namespace outpace
