#include "walk.h"

#include <algorithm>

namespace outpace {
namespace {

constexpr int kCommitted = -1, kNone = -1;

class Walker {
  public:
    Walker(const WalkedTree& tree, const std::vector<int>& places, std::vector<WalkStep>& steps)
        : tree_(tree), places_(places), steps_(steps), children_(tree.parents.size() + 1), sizes_(tree.parents.size()) {
        for (int node = 0; node < count(); ++node)
            if (tree.parents[node] != kUnused) children_[tree.parents[node] + 1].push_back(node);
        for (int node = count() - 1; node >= 0; --node) {
            if (!has_children(node)) continue;
            ++sizes_[node];
            if (tree.parents[node] >= 0) sizes_[tree.parents[node]] += sizes_[node];
        }
    }

    int states() const { return states_; }

    /// Makes the state `to` of a node, and computes the node's children from it.
    void enter(int node, int from, int place, int to) {
        for (int child : children_[node + 1]) {
            if (child < tree_.first_new) continue;
            steps_.push_back({from, place, to, tree_.first_row + child - tree_.first_new});
            from = to, place = kNone;
        }
        if (place != kNone) steps_.push_back({from, place, to, kNone});
    }

    /// Goes below a node, whose state is `state`; states from `free` on hold nothing that is needed.
    void descend(int node, int state, int free) {
        for (bool goes_on = true; goes_on;) {
            std::vector<int> inner;
            std::copy_if(children_[node + 1].begin(), children_[node + 1].end(), std::back_inserter(inner),
                         [&](int child) { return has_children(child); });
            std::stable_sort(inner.begin(), inner.end(), [&](int a, int b) { return sizes_[a] < sizes_[b]; });
            goes_on = !inner.empty();
            const int from = state;
            for (int child : inner) {
                const bool is_last = child == inner.back();
                const int to = is_last && from != kCommitted ? from : free;
                states_ = std::max(states_, to + 1);
                enter(child, from, places_[child], to);
                if (is_last)
                    node = child, state = to, free = std::max(free, to + 1);
                else
                    descend(child, to, free + 1);
            }
        }
    }

  private:
    int count() const { return static_cast<int>(tree_.parents.size()); }
    bool has_children(int node) const { return !children_[node + 1].empty(); }

    const WalkedTree& tree_;
    const std::vector<int>& places_;
    std::vector<WalkStep>& steps_;
    std::vector<std::vector<int>> children_;  // of the committed text, then of each node
    std::vector<int> sizes_;  // number of nodes with children in the branch of a node, itself included
    int states_ = 0;
};

}  // namespace

int add_walk(const WalkedTree& tree, const std::vector<int>& places, const std::vector<int>& folds,
             std::vector<WalkStep>& steps) {
    Walker walker(tree, places, steps);
    for (std::size_t i = 0; i + 1 < folds.size(); ++i) steps.push_back({kCommitted, folds[i], kCommitted, kNone});
    walker.enter(kCommitted, kCommitted, folds.empty() ? kNone : folds.back(), kCommitted);
    walker.descend(kCommitted, kCommitted, 0);
    return walker.states();
}

}  // namespace outpace
