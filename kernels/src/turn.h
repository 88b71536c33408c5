// One request's round: its rows in draft forwards and in the target pass, and its outcome.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "pair.h"

namespace outpace {

/// A forest under construction, and its logits.
class Rows {
  public:
    explicit Rows(const Side& side) : side_(side), turn_floats_(side.model->shape().turn_floats()) {}

    /// Adds one session's rows, `depths` below its committed tokens. sees [tokens, pending + tokens].
    void add(const Place& place, int pending, const std::vector<int>& tokens, const std::vector<int>& depths,
             std::vector<char> sees) {
        sees_.push_back(std::move(sees));
        forest_.spans.push_back({place.store, place.length, pending, static_cast<int>(tokens.size()),
                                 reinterpret_cast<const bool*>(sees_.back().data())});
        for (std::size_t n = 0; n < tokens.size(); ++n) {
            tokens_.push_back(std::min(tokens[n], side_.last_token));
            const int position = std::min(place.length + depths[n], side_.last_position);
            if (position >= side_.positions) throw std::invalid_argument("a position is out of range");
            const float* turn = side_.turns + static_cast<int64_t>(position) * turn_floats_;
            turns_.insert(turns_.end(), turn, turn + turn_floats_);
        }
    }

    int rows() const { return static_cast<int>(tokens_.size()); }

    /// Requests the logits of a row, which decide the token at this position. `path`: the drafted tokens before it, if
    /// logits are adjusted.
    void want(int row, const Drafted& request, int position, std::vector<int> path) {
        wanted_.push_back(row);
        if (request.adjusting) request.adjusting->locate(side_.names, side_.held);
        asking_.push_back({&request, request.noise.key(static_cast<uint64_t>(position)), std::move(path)});
    }

    /// Computes the best `count` tokens of each wanted row: for a draft by log-probability plus noise if there is any,
    /// for the target (count 1) its pick. Returns false if a row has no order or a pick is too close to call.
    bool run(int count, Block<float>& scores, std::vector<Proposals>& best) {
        forest_.tokens = tokens_.data();
        forest_.turns = turns_.data();
        forest_.rows = rows();
        forest_.wanted = wanted_.data();
        forest_.num_wanted = static_cast<int>(wanted_.size());
        const std::size_t outputs = side_.model->outputs();
        scores.reserve(wanted_.size() * outputs);
        best.resize(wanted_.size());
        forest_.after = [&](int number) {
            const auto& [request, key, path] = asking_[number];
            const Noise& noise = request->noise;
            float* row = scores.data() + number * outputs;
            if (request->adjusting) request->adjusting->apply(row, side_.names, side_.held, path);
            Ranking task{row, side_.names, side_.held, 1.0, nullptr, count > 1};
            if (noise.is_there()) {
                task.temperature = noise.temperature;
                task.key = &key;
                task.filters = noise.filters;
            }
            best[number] = best_of(side_.model->kernels(), task, noise.is_there() ? std::max(count, 2) : count);
        };
        side_.model->forward(forest_, scores.data());
        for (std::size_t number = 0; number < best.size(); ++number) {
            if (best[number].tokens.empty()) return false;
            if (count == 1 && asking_[number].request->noise.is_there() && !is_clear(best[number])) return false;
        }
        return true;
    }

  private:
    const Side& side_;
    const int turn_floats_;
    Forest forest_{};
    std::vector<std::vector<char>> sees_;
    std::vector<int> tokens_, wanted_;
    std::vector<float> turns_;
    struct Asking {
        const Drafted* request;
        uint64_t key;  // of its noise
        std::vector<int> path;
    };
    std::vector<Asking> asking_;  // of each wanted row
};

/// One request in a round.
struct Turn {
    Drafted& request;
    PlannedTree tree;
    std::vector<int> parents{};  // by pending node of the draft session: its parent among them, or none
    std::vector<Proposals> offers{};  // by pending node: the proposals below it
    std::vector<int> frontier{};
    std::vector<int> nodes{};  // nodes to verify
    bool is_done = false;  // the draft model has nothing more for it
    bool fewer = false;
    std::vector<Planted> planted{};  // copies below each node that existed when copying ended

    Turn(Drafted& one, const Growing& growing)
        : request(one), tree(one.plan, growing, one.tokens, one.parents, one.scores, one.chances) {}

    /// Returns the position of the token after a node; the root is after the target's committed tokens.
    int decides(int node) const { return request.target.length + tree.depth(node) + 1; }

    /// Returns the tokens from below the root down to a node, if logits are adjusted.
    std::vector<int> path_to(int node) const {
        std::vector<int> path(request.adjusting ? tree.depth(node) : 0);
        for (auto place = path.rbegin(); place != path.rend(); ++place, node = tree.parent(node)) *place = tree.token(node);
        return path;
    }

    /// Whether the draft session has slots for the next forward.
    bool has_slots() const {
        const std::size_t nodes = request.missing.size() + parents.size() + frontier.size();
        return request.draft.length + static_cast<int>(nodes) <= request.draft.store->slots();
    }

    /// Adds the rows of the next draft forward: unread tokens, and the frontier.
    void add_to(Rows& rows) {
        const int missing = static_cast<int>(request.missing.size()), pending = static_cast<int>(parents.size());
        const int count = missing + static_cast<int>(frontier.size()), columns = pending + count;
        std::vector<int> tokens(request.missing), below(missing);
        std::iota(below.begin(), below.end(), 0);
        std::vector<char> sees(static_cast<std::size_t>(count) * columns, 0);
        for (int row = 0; row < missing; ++row) std::fill_n(sees.begin() + row * columns, row + 1, 1);
        for (std::size_t n = 0; n < frontier.size(); ++n) {  // nothing is pending while tokens are missing
            const int node = frontier[n], above = node ? tree.slot(tree.parent(node)) : kNoParent;
            rows.want(rows.rows() + missing + static_cast<int>(n), request, decides(node), path_to(node));
            tree.expand(node, static_cast<int>(parents.size()));
            tokens.push_back(tree.token(node));
            below.push_back(missing + tree.depth(node));
            char* row = sees.data() + (missing + n) * columns;
            std::fill_n(row, missing, 1);
            for (int slot = static_cast<int>(parents.size()), next; slot != kNoParent; slot = next) {
                next = slot == static_cast<int>(parents.size()) ? above : parents[slot];
                row[missing + slot] = 1;
            }
            parents.push_back(above);
        }
        rows.add(request.draft, pending, tokens, below, std::move(sees));
    }

    /// Adds the proposals of a finished forward below the frontier; returns the number of added nodes.
    int take(const std::vector<Proposals>& proposals) {
        request.draft.length += static_cast<int>(request.missing.size());
        request.missing.clear();
        offers.insert(offers.end(), proposals.begin(), proposals.end());
        return tree.hang(frontier, proposals);
    }

    /// Adds the rows of the target pass.
    void add_chosen(Rows& rows) const {
        const int count = static_cast<int>(nodes.size());
        std::vector<int> tokens, below, places(tree.size(), -1);
        std::vector<char> sees(static_cast<std::size_t>(count) * count, 0);
        for (int n = 0; n < count; ++n) {
            const int node = nodes[n];
            places[node] = n;
            tokens.push_back(tree.token(node));
            below.push_back(tree.depth(node));
            for (int above = node; above != kNoParent; above = tree.parent(above)) sees[n * count + places[above]] = 1;
            rows.want(rows.rows() + n, request, decides(node), path_to(node));
        }
        rows.add(request.target, 0, tokens, below, std::move(sees));
    }

    Outcome outcome(const std::vector<int>& picks) const;
    void commit(const Outcome& outcome);
};

}  // namespace outpace
