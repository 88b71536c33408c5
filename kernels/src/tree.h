// A tree of candidate tokens: the operations of a round that would be slow in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace outpace {

constexpr int kPrefix = -1;  // the parent of the root

enum Role : uint8_t { kPrimary, kSecondary, kProbe };
/// How the children of one node were chosen.
enum Siblings : uint8_t { kUnset, kPicked, kDrawn, kWithoutReplacement };

/// How scores of proposals become acceptance probabilities (drafters/_calibration.py).
struct Calibration {
    double temperature;
    double coverage;  // probability that any proposal is picked
    double open;      // if not negative: coverage is 1 - open * (1 - the sum of the proposals' q), and values are log q
};

/// A model's proposals for the token after one node, best first: log q, or log q plus shared noise.
struct Proposals {
    std::vector<int64_t> tokens;
    std::vector<double> values;
};

/// A range of rows of one pass's proposals; ranges share the rows.
struct ProposalRows {
    std::shared_ptr<const std::vector<Proposals>> rows;
    int first = 0, count = 0;

    const Proposals& at(int row) const { return (*rows)[first + row]; }
};

/// A child that may be added: path score, parent, token.
struct Child {
    double score;
    int parent, token;
};

/// Nodes that were added to a tree, with their parents' ids, to be sent to a copy of the tree.
struct Delta {
    std::vector<int64_t> ids, parents;
    std::vector<int> tokens, roles;
    std::vector<double> log_probs;
};

class PickModel;

/// Nodes in order of insertion, parents before children. A path score never exceeds the parent's, so the best n nodes
/// include their ancestors. Methods throw std::invalid_argument for invalid nodes or scores.
class TokenTree {
  public:
    TokenTree(int token, int64_t root_id, int64_t next_id);

    int size() const { return static_cast<int>(tokens.size()); }

    /// Adds a child; returns its number, or kPrefix if a picked sibling has the same token.
    int add(int parent, int token, double score, int role, int kind, int64_t id);
    /// Adds picked children, best first: those below the bound are left out, the first `primary` are primary nodes.
    void attach_children(const std::vector<Child>& children, int primary);
    /// Adds the best proposals below each node of `frontier`, parents first; returns the number of nodes that are new or
    /// confirmed. At most `max_children` children are added, best first. Proposals that the tree has already are
    /// confirmed first, see `confirm`.
    int attach_offers(const std::vector<int>& frontier, const ProposalRows& offers, const PickModel& picks, int width,
                      int max_children);
    /// Adds picked tokens, each below the one before; returns the first node.
    int chain(int parent, const std::vector<int>& new_tokens, const std::vector<double>& new_scores);
    /// Declares how the children of a node are chosen; throws if another way was declared before.
    void declare(int node, int kind);

    int child(int node, int token) const;
    std::vector<int> children(int node) const;
    bool has_children(int node) const {
        check(node);
        return first_child_[node] >= 0;
    }
    std::vector<int> leaves() const;
    std::vector<int> path(int node) const;
    std::vector<int> path_tokens(int node) const;
    int depth(int node) const {
        check(node);
        return depths[node];
    }
    int deepest() const;
    int siblings_of(int node) const {
        check(node);
        return kinds_[node] == kUnset ? static_cast<int>(kPicked) : kinds_[node];
    }
    /// Returns the node with this id, or kPrefix.
    int find(int64_t id) const;
    bool is_chain() const;
    /// Returns the nodes with the best path scores, parents first. Throws unless all children are picked or it is a
    /// chain.
    std::vector<int> best(int count) const;
    /// Returns the best `count` path scores below the root, best first; with `leaves`, those of all nodes without
    /// children.
    std::vector<double> best_scores(int count, bool leaves) const;
    /// Returns how many of the best `max_leaves` leaves to expand in one step of fixed + count * per_node seconds, so
    /// that the sum of their chances per second is greatest.
    int best_width(int max_leaves, double fixed, double per_node) const;
    /// Returns for each node the probability that the target accepts it and all its ancestors: exp(score) with each step
    /// multiplied by the factor of its source, or by `other` for sources without one. Steps are at most 1.
    std::vector<double> chances(const std::vector<std::pair<int, double>>& factors, double other) const;
    /// Returns the chances of the nodes below which a source's model may grow: leaves, and the nodes up to
    /// `last_lookup_node` that it has not expanded, with the chance that no child continues them times `factor`. The
    /// root counts only if `with_root`.
    std::vector<double> parent_chances(const std::vector<double>& chances, int source, int last_lookup_node,
                                       double factor, bool with_root) const;
    std::vector<int> subtree(int node) const;
    double bound(const std::vector<double>& more) const;
    /// Follows picks from the root; the first `count` nodes have one, `pick(node)`. Returns the path, and the pick after
    /// its end unless it ends on a node without one.
    std::pair<std::vector<int>, std::optional<int64_t>> follow(int count, const std::function<int64_t(int)>& pick) const;
    /// Becomes a tree of these nodes of another tree, the first as root.
    void take(const TokenTree& other, const std::vector<int>& nodes);
    /// Becomes the tree below a node of another tree.
    void take_below(const TokenTree& other, int node) { take(other, other.subtree(node)); }
    /// Becomes a tree of the best nodes of another tree.
    void take_best(const TokenTree& other, int count) { take(other, other.best(count)); }
    /// Adds the nodes of another tree from `first` on whose parents were here before, with their ids. Unless
    /// `is_secondary_visible`, secondary nodes that were not expanded are left out.
    void adopt(const TokenTree& other, int first, bool is_secondary_visible);
    /// Returns the nodes from `first` on.
    Delta delta(int first) const;
    /// Adds nodes by their parents' ids; returns how many were added and how many have no parent here. The delta must
    /// come from a tree, so no two siblings have the same token.
    std::pair<int, int> insert(const Delta& delta);

    std::vector<int> tokens, parents, depths;
    std::vector<double> scores;
    std::vector<uint8_t> roles;
    std::vector<int64_t> ids;
    std::vector<int16_t> sources;
    int64_t next_id;
    int16_t current_source = 0;
    int vocab_size = std::numeric_limits<int>::max();  // only tokens below it are added
    int max_nodes = -1;  // negative: unknown
    bool is_drawn = false;  // some children were drawn
    int num_confirmed = 0;  // children that were proposed again, see `confirm`

  private:
    /// If `parent` has a child with this token whose score is less than that of `parent` plus `chance`, raises it to
    /// that, and the scores of all nodes below by as much, and gives it the current source.
    void confirm(int parent, int token, double chance);
    void append(int parent, int token, double score, int role, int64_t id);
    /// Throws unless the tree has this node.
    void check(int node) const;
    void check_parent(int parent) const;

    std::vector<int> first_child_, last_child_, next_sibling_;
    std::vector<uint8_t> kinds_;
    bool is_sorted_ = true;  // ids ascend
};

/// Maps the ids of the tree nodes that a model has expanded to the session's pending nodes (slots) that hold them, and
/// collects the other nodes of the tree, which may be expanded next.
class SlotMap {
  public:
    int size() const { return static_cast<int>(slots_.size()); }
    bool contains(int64_t id) const { return slots_.count(id) > 0; }
    /// Returns the slot of a node, or kPrefix.
    int get(int64_t id) const {
        const auto place = slots_.find(id);
        return place == slots_.end() ? kPrefix : place->second;
    }
    void set(int64_t id, int slot) { slots_[id] = slot; }
    void clear() {
        slots_.clear();
        reset();
    }
    std::vector<int64_t> ids() const;
    /// Assigns slots from `first` on to nodes of a tree, parents first. Returns their tokens and their parents' slots,
    /// increased by `missing`, the number of other rows before them in the pass.
    std::pair<std::vector<int>, std::vector<int>> expand(const TokenTree& tree, const std::vector<int>& nodes,
                                                         int first, int missing);
    /// Follows a verification. Returns the slots of the accepted nodes up to the first that was not expanded, and of
    /// the nodes of `tree`; renumbers the latter from 0 and forgets all others.
    std::pair<std::vector<int>, std::vector<int>> follow(const std::vector<int64_t>& accepted, const TokenTree& tree);
    /// Forgets the nodes that may be expanded: the tree or its scores have changed.
    void reset() { open_.clear(), seen_ = 0; }
    /// Removes the best `count` nodes that may be expanded and returns them in tree order, without those below the
    /// tree's bound. They are at most `deepest` deep, have at least the path score `floor`, and a node's parent was
    /// expanded before or is among them.
    std::vector<int> next(const TokenTree& tree, int count, double floor, int deepest);
    /// Returns the best `count` of the other nodes, in tree order.
    std::vector<int> peek(int count) const;

  private:
    std::unordered_map<int64_t, int> slots_;
    std::vector<std::pair<double, int>> open_;  // a heap of (-path score, node), the smallest on top
    int seen_ = 0;                              // nodes of the tree that were considered for the heap
    int num_confirmed_ = 0;                     // the tree's `num_confirmed` when they were put into it
    double floor_ = 0.0;                        // lowest path score of nodes that were put into it
};

/// The proposals below expanded nodes, by the id of the node.
class OfferMap {
  public:
    int size() const { return static_cast<int>(offers_.size()); }
    /// Records the rows of these nodes, except empty ones.
    void record(const TokenTree& tree, const std::vector<int>& nodes, const ProposalRows& rows);
    /// Returns the proposals below a node, or a null pointer.
    const Proposals* get(int64_t id) const {
        const auto place = offers_.find(id);
        return place == offers_.end() ? nullptr : &place->second.at(0);
    }
    /// Forgets the nodes that are not in `slots`.
    void keep(const SlotMap& slots);

  private:
    std::unordered_map<int64_t, ProposalRows> offers_;
};

/// The pending nodes of a session: their parents and depths. A node attends to its ancestors and itself.
class PendingNodes {
  public:
    int size() const { return static_cast<int>(parents.size()); }
    /// Appends one node below each of these parents.
    void add(const std::vector<int>& new_parents);
    /// Returns the rows from `first` on, a byte for each node: whether the row attends to it.
    std::string mask(int first) const;
    /// Keeps these nodes, parents first, and renumbers them from 0. One whose parent is dropped is at depth 0.
    void keep(const std::vector<int>& live);

    std::vector<int> parents, depths;
};

/// Estimates the probability that the target picks each of a node's proposals, from what it picked before
/// (drafters/_calibration.py).
class PickModel {
  public:
    explicit PickModel(bool has_shares);
    /// Learns that the target picked a proposal by its place, or none of them (a negative place).
    void learn(const std::vector<double>& values, int picked);
    /// Learns from the proposals below each of these nodes and the token that the target wrote there.
    void learn_written(const OfferMap& offers, const std::vector<int64_t>& nodes, const std::vector<int64_t>& written);
    /// Starts from these parameters; `fit.temperature` is rounded to a known one.
    void restore(const Calibration& fit, double coverage_weight, double open_weight);
    Calibration fit() const;
    /// Returns the log probabilities of the first `count` proposals.
    std::vector<double> log_chances(const std::vector<double>& values, int count) const;

  private:
    /// A ratio of two decayed sums.
    struct Rate {
        double numerator, denominator;

        double value() const { return numerator / denominator; }
        void learn(double more, double weight);
    };

    bool has_shares_;
    Rate coverage_, open_;
    std::vector<double> likelihoods_;  // of the known temperatures, given the picks
    double temperature_;
};

}  // namespace outpace
