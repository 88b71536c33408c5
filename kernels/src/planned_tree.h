// The token tree of a round while it is planned: which nodes to expand next, whether another layer pays, and which
// nodes to verify. It computes the same numbers as outpace/planning and outpace/drafters/model.py.
#pragma once

#include <cstdint>
#include <vector>

#include "proposals.h"

namespace outpace {

constexpr int kNoParent = -1;  // of the root

/// Converts the logarithms of draft probabilities to calibrated acceptance probabilities (drafters/_calibration.py).
struct ChoiceFit {
    double temperature;
    // remaining probability as a multiple of what the proposals leave; negative: values are not probabilities
    double open;
    double coverage;  // in that case: probability that any proposal is picked
};

/// Constants of a request until the call ends. Seconds are priced in tokens.
struct Plan {
    ChoiceFit fit;
    int budget;  // nodes that may be verified, the root included
    int deepest;  // most layers of a round
    int explores;  // number of coming rounds that explore a first layer
    double price;  // value of a second in tokens
    double cost;  // of a layer, in tokens
    double trust;  // in the draft model's probabilities
    double row;  // value that a node needs so that one below it may pay
    double least;  // nodes with lower path scores are not added, except a node's best child
    double copied;  // probability that the walk reaches a node that existed before the draft grew
    std::vector<double> growth;  // by layer, the last for all deeper ones: value over the probability at the leaves
    std::vector<bool> due;  // by layer: explore it even if it does not pay
};

/// Costs of passes over all requests.
struct PassTimes {
    std::vector<double> seconds;  // for 1, 2, ... rows
    int widest;  // rows of the widest pass that was timed
    std::vector<bool> untimed;  // for 1, 2, ... rows: such a pass is wanted to learn its time
};

/// Options of drafting.
struct Growing {
    int width;  // nodes of a request in a forward, and children of each
    int tree_nodes;  // the largest tree
    double floor;  // nodes with lower path scores are not expanded
};

/// Results of a layer, for the acceptance model.
struct Grown {
    double worth;  // added to the tree
    double at_leaves;  // probability at the leaves before
    bool counts;  // it is typical of such layers
};

class PlannedTree {
  public:
    /// Takes an existing tree with the probabilities of its nodes. Parents precede children.
    PlannedTree(const Plan& plan, const Growing& growing, std::vector<int> tokens, std::vector<int> parents,
                std::vector<double> scores, std::vector<double> chances);

    int size() const { return static_cast<int>(tokens_.size()); }
    int token(int node) const { return tokens_[node]; }
    int parent(int node) const { return parents_[node]; }
    double score(int node) const { return scores_[node]; }
    int depth(int node) const { return depths_[node]; }

    /// Index of an expanded node among the draft session's pending nodes; negative for others.
    int slot(int node) const { return slots_[node]; }
    void expand(int node, int slot) { slots_[node] = slot; }

    /// Adds a copied token with its path score below a node that has no child for it; returns the new node.
    int copy(int parent, int token, double score);

    /// Marks the end of copying.
    void finish_copies();

    /// Whether a node was copied.
    bool is_copied(int node) const { return node < copied_end_ && node >= first_; }

    /// Whether another layer is worth its cost or due for exploration.
    bool pays();

    /// Returns the best unexpanded nodes, parents first, no deeper than `most_depth`.
    std::vector<int> frontier(int most_depth) const;

    /// Adds the proposals below each of these nodes; returns the number of added nodes.
    int hang(const std::vector<int>& frontier, const std::vector<Proposals>& proposals);

    /// Completes a layer, where `others` is the number of other requests' rows in the pass.
    void finish_layer(const PassTimes& times, int others);

    /// Returns the nodes to verify, the root first, parents before children. `fewer` is set if these are fewer than
    /// pay, in order to learn the time of so small a pass, which is allowed if `wanted`.
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
    const int first_;  // first node that is new in this round
    int copied_end_;  // after the last copied node
    double copied_;  // see Plan
    double worth_ = 0.0, at_leaves_ = 0.0;
    bool is_trial_ = false;
};

/// Returns the logarithms of the estimated probabilities of the first `count` proposals.
std::vector<double> log_chances(const ChoiceFit& fit, const std::vector<double>& values, int count);

/// Number of rows that pay, the root included, for nodes with these descending probabilities, and their value above
/// their price.
struct BestRows {
    int rows;
    double worth;
};
BestRows best_rows(const std::vector<double>& falling, const PassTimes& times, int others, double price);

}  // namespace outpace
