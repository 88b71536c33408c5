#include "turn.h"

#include <algorithm>

namespace outpace {
namespace {

/// Commits the pending slots `path` of a session.
void keep(Place& place, const std::vector<int>& path) {
    std::vector<int> source;
    bool is_moved = false;
    for (std::size_t n = 0; n < path.size(); ++n) {
        source.push_back(place.length + path[n]);
        is_moved |= path[n] != static_cast<int>(n);
    }
    if (is_moved) place.store->move(source, place.length);
    place.length += static_cast<int>(path.size());
}

}  // namespace

/// Returns the outcome of the round, where `picks` are the target's tokens after the verified nodes.
Outcome Turn::outcome(const std::vector<int>& picks) const {
    Outcome out{};
    std::vector<int> places(tree.size(), -1);
    const int before = static_cast<int>(request.tokens.size());
    for (std::size_t n = 0; n < nodes.size(); ++n) {
        const int node = nodes[n];
        places[node] = static_cast<int>(n);
        if (node < before) {
            out.known.push_back(node);
            continue;
        }
        out.tokens.push_back(tree.token(node));
        out.parents.push_back(places[tree.parent(node)]);
        out.scores.push_back(tree.score(node));
        out.copied.push_back(tree.is_copied(node));
    }
    out.picks = picks;
    for (int node = 0; node >= 0 && places[node] >= 0;) {
        const int pick = picks[places[node]];
        out.path.push_back(places[node]);
        if (request.copies) out.planted.push_back(node < static_cast<int>(planted.size()) ? planted[node] : Planted{});
        if (tree.slot(node) >= 0) {
            const Proposals& offer = offers[tree.slot(node)];
            const auto found = std::find(offer.tokens.begin(), offer.tokens.end(), pick);
            const bool is_among = found != offer.tokens.end();
            out.picked.push_back({offer.values, is_among ? static_cast<int>(found - offer.tokens.begin()) : -1});
        }
        node = tree.child(node, pick);
    }
    out.layers = tree.grown();
    out.is_trial = tree.is_trial();
    out.is_fewer = fewer;
    return out;
}

/// Commits the accepted path in both sessions; the next round starts with the target's last token.
void Turn::commit(const Outcome& outcome) {
    keep(request.target, outcome.path);
    std::vector<int> read;
    for (int place : outcome.path) {
        const int node = nodes[place];
        if (tree.slot(node) >= 0 && request.missing.empty())
            read.push_back(tree.slot(node));
        else
            request.missing.push_back(tree.token(node));
    }
    keep(request.draft, read);
    const int written = static_cast<int>(outcome.path.size());
    request.left -= written;
    request.most_depth -= written;
    request.rows = static_cast<int>(nodes.size());
    request.follows = !outcome.layers.empty();
    for (std::size_t layer = 0; layer < std::min(outcome.layers.size(), request.plan.due.size()); ++layer)
        request.plan.due[layer] = false;
    request.plan.explores -= request.follows;
    request.plan.copied = 0.0;
    std::vector<int> tokens;
    for (int place : outcome.path) tokens.push_back(outcome.picks[place]);
    if (request.copies) request.copies->extend(tokens);
    if (request.adjusting) request.adjusting->extend(tokens);
    request.tokens = {outcome.picks[outcome.path.back()]};
    request.parents = {kNoParent};
    request.scores = {0.0};
    request.chances = {1.0};
}

}  // namespace outpace
