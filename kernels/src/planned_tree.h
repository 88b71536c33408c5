// A round's token tree while it is planned: which nodes the draft expands next, whether one more layer of them pays, and
// which nodes are verified. What outpace/planning/planner.py and outpace/drafters/model.py do in Python, number by number.
#pragma once

#include <cstdint>
#include <vector>

#include "proposals.h"

namespace outpace {

constexpr int kNoParent = -1;  // of the root

/// How the logarithms of the draft's shares become chances that the target picks a token (drafters/_calibration.py).
struct ChoiceFit {
    double temperature;
    double open;      // what is left open, as a multiple of what the shares leave open; below 0: they are no shares
    double coverage;  // then: the chance that any proposal is picked
};

/// What holds for a request until the call ends. Seconds are priced in tokens.
struct Plan {
    ChoiceFit fit;
    int budget;    // nodes that may be verified, the root included
    int deepest;   // layers of a round at most
    int explores;  // rounds to come that grow a first layer to see what it gives
    double price;  // tokens that a second is worth
    double cost;   // of a layer, in tokens
    double trust;  // of the draft's chances
    double row;    // what a node must be worth so that one below it may pay
    double least;  // path scores below this are not planted, but for the best of a node
    double copied;  // the chance that the walk comes to a node that stood there before the draft grew
    std::vector<double> growth;  // by layer, the last for all deeper ones: worth over the chance at the leaves
    std::vector<bool> due;       // by layer: it is grown as a trial where it does not pay
};

/// What passes cost, of all requests together.
struct PassTimes {
    std::vector<double> seconds;  // over 1, 2, ... rows
    int widest;                   // rows of the widest pass that was timed
    std::vector<bool> untimed;    // over 1, 2, ... rows: such a pass is wanted for the sake of knowing its time
};

/// How the draft expands nodes.
struct Growing {
    int width;       // nodes of a request in a forward, and children of each
    int tree_nodes;  // the largest tree
    double floor;    // path scores below this are not expanded
};

/// What a layer gave, for whoever learns from it.
struct Grown {
    double worth;      // that it added to the tree
    double at_leaves;  // the chance at the leaves before
    bool counts;       // it tells what such layers give
};

class PlannedTree {
  public:
    /// A tree as others have left it, with the chances that its nodes are walked to. Parents stand before children.
    PlannedTree(const Plan& plan, const Growing& growing, std::vector<int> tokens, std::vector<int> parents,
                std::vector<double> scores, std::vector<double> chances);

    int size() const { return static_cast<int>(tokens_.size()); }
    int token(int node) const { return tokens_[node]; }
    int parent(int node) const { return parents_[node]; }
    double score(int node) const { return scores_[node]; }
    int depth(int node) const { return depths_[node]; }

    /// Where an expanded node lies among the draft's pending ones; below 0 for others.
    int slot(int node) const { return slots_[node]; }
    void expand(int node, int slot) { slots_[node] = slot; }

    /// Hangs a token that was copied, with its path score, below a node that has no child of it; the new node.
    int copy(int parent, int token, double score);

    /// All copies stand.
    void finish_copies();

    /// Whether a node was copied.
    bool is_copied(int node) const { return node < copied_end_ && node >= first_; }

    /// Whether one more layer brings more than it costs, or is due for a trial.
    bool pays();

    /// The best nodes that are not expanded, parents first, no deeper than `most_depth`.
    std::vector<int> frontier(int most_depth) const;

    /// Hangs what is proposed below each of these nodes; how many nodes that adds.
    int hang(const std::vector<int>& frontier, const std::vector<Proposals>& proposals);

    /// The layer is complete, while others have so many rows in the pass.
    void finish_layer(const PassTimes& times, int others);

    /// The nodes that are verified, the root first, parents before children. `fewer` says whether fewer than pay are,
    /// to know what so few cost, which they may be where it is `wanted`.
    std::vector<int> choose(const PassTimes& times, int others, bool wanted, bool& fewer) const;

    int child(int node, int64_t token) const;
    const std::vector<Grown>& grown() const { return grown_; }
    bool is_trial() const { return is_trial_; }

  private:
    int add(int parent, int token, double score, double own);
    double reach() const;
    double chance_at_leaf(double chance) const { return chance > plan_.row ? chance - plan_.row : 0.0; }
    std::vector<double> falling_chances() const;
    bool is_due(std::size_t layer) const;

    const Plan& plan_;
    const Growing& growing_;
    std::vector<int> tokens_, parents_, depths_, slots_;
    std::vector<double> scores_, chances_;
    std::vector<std::vector<int>> children_;
    std::vector<Grown> grown_;
    const int first_;  // node that was not there before
    int copied_end_;   // behind the last one that was copied
    double copied_;    // see Plan
    double worth_ = 0.0, at_leaves_ = 0.0;
    bool is_trial_ = false;
};

/// The logarithms of the estimated chances of the first `count` proposals.
std::vector<double> log_chances(const ChoiceFit& fit, const std::vector<double>& values, int count);

/// How many rows pay, the root's included, of nodes with these falling chances, and what they bring above their price.
struct BestRows {
    int rows;
    double worth;
};
BestRows best_rows(const std::vector<double>& falling, const PassTimes& times, int others, double price);

}  // namespace outpace
