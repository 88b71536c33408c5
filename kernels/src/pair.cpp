#include "pair.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>

namespace outpace {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// A forest that is put together, and its scores.
class Rows {
  public:
    explicit Rows(const Side& side) : side_(side), depth_(side.model->shape().heads.depth) {}

    /// One session's rows: `depths` below its committed tokens. sees [tokens, pending + tokens].
    void add(const Place& place, int pending, const std::vector<int>& tokens, const std::vector<int>& depths,
             std::vector<char> sees) {
        sees_.push_back(std::move(sees));
        forest_.spans.push_back({place.store, place.length, pending, static_cast<int>(tokens.size()),
                                 reinterpret_cast<const bool*>(sees_.back().data())});
        for (std::size_t n = 0; n < tokens.size(); ++n) {
            tokens_.push_back(std::min(tokens[n], side_.last_token));
            const int position = std::min(place.length + depths[n], side_.last_position);
            const float* turn = side_.turns + static_cast<int64_t>(position) * depth_;
            turns_.insert(turns_.end(), turn, turn + depth_);
        }
    }

    int rows() const { return static_cast<int>(tokens_.size()); }

    /// Scores of these rows; the best `count` tokens of each, by the logarithms of their shares where they are several.
    /// False: a row has no order.
    bool run(const std::vector<int>& wanted, int count, Block<float>& scores, std::vector<Proposals>& best) {
        forest_.tokens = tokens_.data();
        forest_.turns = turns_.data();
        forest_.rows = rows();
        forest_.wanted = wanted.data();
        forest_.num_wanted = static_cast<int>(wanted.size());
        const std::size_t outputs = side_.model->outputs();
        scores.reserve(wanted.size() * outputs);
        best.resize(wanted.size());
        forest_.after = [&](int row) {
            std::vector<Ranked> found(std::min(count, side_.held));
            const Ranking task{scores.data() + row * outputs, side_.names, side_.held, 1.0, nullptr, count > 1};
            found.resize(side_.model->kernels().rank(task, static_cast<int>(found.size()), found.data()));
            for (const Ranked& one : found) {
                best[row].tokens.push_back(one.token);
                best[row].values.push_back(one.value);
            }
        };
        side_.model->forward(forest_, scores.data());
        for (const Proposals& one : best)
            if (one.tokens.empty()) return false;
        return true;
    }

  private:
    const Side& side_;
    const int depth_;
    Forest forest_{};
    std::vector<std::vector<char>> sees_;
    std::vector<int> tokens_;
    std::vector<float> turns_;
};

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

/// One request in a round.
struct Turn {
    Drafted& request;
    PlannedTree tree;
    std::vector<int> parents{};    // by pending node of the draft's session: its parent among them, or none
    std::vector<int> depths{};     // the same: below what is committed
    std::vector<Proposals> offers{};  // the same: what is proposed below it
    std::vector<int> frontier{};
    std::vector<int> nodes{};  // that are verified
    bool is_done = false;      // the draft has nothing more for it
    bool fewer = false;
    std::vector<Planted> planted{};  // below each node that was there when all copies stood

    Turn(Drafted& one, const Growing& growing)
        : request(one), tree(one.plan, growing, one.tokens, one.parents, one.scores, one.chances) {}

    /// The rows of the next forward of the draft: what it has not read, and the frontier.
    void add_to(Rows& rows, std::vector<int>& wanted) {
        const int missing = static_cast<int>(request.missing.size()), pending = static_cast<int>(parents.size());
        const int count = missing + static_cast<int>(frontier.size()), columns = pending + count;
        std::vector<int> tokens(request.missing), below(missing);
        std::iota(below.begin(), below.end(), 0);
        std::vector<char> sees(static_cast<std::size_t>(count) * columns, 0);
        for (int row = 0; row < missing; ++row) std::fill_n(sees.begin() + row * columns, row + 1, 1);
        for (std::size_t n = 0; n < frontier.size(); ++n) {  // where tokens are missing nothing is pending
            const int node = frontier[n], above = node ? tree.slot(tree.parent(node)) : kNoParent;
            wanted.push_back(rows.rows() + missing + static_cast<int>(n));
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

    /// The forward is over, with what it proposes below the frontier; how many nodes that adds.
    int take(const std::vector<Proposals>& proposals) {
        request.draft.length += static_cast<int>(request.missing.size());
        request.missing.clear();
        offers.insert(offers.end(), proposals.begin(), proposals.end());
        return tree.hang(frontier, proposals);
    }

    /// The rows of the target's pass.
    void add_chosen(Rows& rows, std::vector<int>& wanted) const {
        const int count = static_cast<int>(nodes.size());
        std::vector<int> tokens, below, places(tree.size(), -1);
        std::vector<char> sees(static_cast<std::size_t>(count) * count, 0);
        for (int n = 0; n < count; ++n) {
            const int node = nodes[n];
            places[node] = n;
            tokens.push_back(tree.token(node));
            below.push_back(tree.depth(node));
            for (int above = node; above != kNoParent; above = tree.parent(above)) sees[n * count + places[above]] = 1;
            wanted.push_back(rows.rows() + n);
        }
        rows.add(request.target, 0, tokens, below, std::move(sees));
    }

    Outcome outcome(const std::vector<int>& picks) const;
    void commit(const Outcome& outcome);
};

/// What the round gave, where the target writes `picks` behind the verified nodes.
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

/// What was walked is committed in both sessions, and the next round begins with what the target wrote last.
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
    if (request.copies) {
        std::vector<int> tokens;
        for (int place : outcome.path) tokens.push_back(outcome.picks[place]);
        request.copies->extend(tokens);
    }
    request.tokens = {outcome.picks[outcome.path.back()]};
    request.parents = {kNoParent};
    request.scores = {0.0};
    request.chances = {1.0};
}

/// All requests in one round.
class Rounds {
  public:
    Rounds(const Side& target, const Side& draft, const Growing& growing, int proposed, const PassTimes& times,
           const std::vector<Drafted*>& requests, Block<float>& scores)
        : target_(target),
          draft_(draft),
          growing_(growing),
          proposed_(proposed),
          times_(times),
          requests_(requests),
          scores_(scores) {}

    /// Whether every session has slots for another round.
    bool have_room() const {
        for (const Drafted* one : requests_) {
            const int read = static_cast<int>(one->missing.size());
            const int grown = one->plan.deepest ? growing_.width * one->plan.deepest + read : 0;
            if (one->target.length + one->plan.budget > one->target.store->slots()) return false;
            if (one->draft.length + grown > one->draft.store->slots()) return false;
        }
        return true;
    }

    /// False: a row has no order, and nothing is committed.
    bool run(Round& round);

    /// Whether a request is over.
    static bool ends(const Drafted& request, const Outcome& outcome) {
        if (request.left < 1) return true;
        for (int place : outcome.path)
            if (std::count(request.stops.begin(), request.stops.end(), outcome.picks[place])) return true;
        return false;
    }

  private:
    bool grow(std::vector<Turn>& turns, Round& round);
    bool expand(std::vector<Turn*> jobs);
    bool verify(std::vector<Turn>& turns, std::vector<std::vector<int>>& picks);
    int others(const std::vector<Turn>& turns, const Turn& one) const {
        int rows = 0;
        for (const Turn& turn : turns)
            if (&turn != &one) rows += turn.nodes.empty() ? turn.request.rows : static_cast<int>(turn.nodes.size());
        return rows;
    }

    const Side &target_, &draft_;
    const Growing& growing_;
    const int proposed_;
    const PassTimes& times_;
    const std::vector<Drafted*>& requests_;
    Block<float>& scores_;
};

/// Layers while they pay, of all who ask for one in the same forward.
bool Rounds::grow(std::vector<Turn>& turns, Round& round) {
    while (true) {
        std::vector<Turn*> asking;
        for (Turn& turn : turns)
            if (!turn.is_done && turn.tree.pays()) asking.push_back(&turn);
        if (asking.empty()) return true;
        const Clock::time_point start = Clock::now();
        bool is_step = true;
        std::vector<int> before;
        for (Turn* turn : asking) {
            is_step &= !turn->tree.grown().empty() || turn->request.follows;
            before.push_back(turn->tree.size());
        }
        if (!expand(asking)) return false;
        round.layers.push_back({since(start), static_cast<int>(asking.size()), is_step});
        for (std::size_t n = 0; n < asking.size(); ++n) {
            asking[n]->is_done = asking[n]->tree.size() == before[n];
            if (!asking[n]->is_done) asking[n]->tree.finish_layer(times_, others(turns, *asking[n]));
        }
    }
}

/// One forward of the draft; another one for a tree to which it added nothing because all of that stood there.
bool Rounds::expand(std::vector<Turn*> jobs) {
    while (true) {
        Rows rows(draft_);
        std::vector<int> wanted;
        std::vector<Turn*> again;
        for (Turn* turn : jobs) {
            turn->frontier = turn->tree.frontier(turn->request.most_depth);
            if (turn->frontier.empty()) continue;
            turn->add_to(rows, wanted);
            again.push_back(turn);
        }
        if (again.empty()) return true;
        std::vector<Proposals> best;
        if (!rows.run(wanted, proposed_, scores_, best)) return false;
        jobs.clear();
        auto next = best.begin();
        for (Turn* turn : again) {
            const auto end = next + static_cast<int64_t>(turn->frontier.size());
            if (turn->take({next, end}) == 0) jobs.push_back(turn);
            next = end;
        }
        if (jobs.empty()) return true;
    }
}

bool Rounds::verify(std::vector<Turn>& turns, std::vector<std::vector<int>>& picks) {
    Rows rows(target_);
    std::vector<int> wanted;
    for (Turn& turn : turns) turn.nodes = turn.tree.choose(times_, others(turns, turn), turn.fewer);
    for (const Turn& turn : turns) turn.add_chosen(rows, wanted);
    std::vector<Proposals> best;
    if (!rows.run(wanted, 1, scores_, best)) return false;
    auto next = best.begin();
    for (const Turn& turn : turns) {
        picks.emplace_back();
        for (std::size_t n = 0; n < turn.nodes.size(); ++n) picks.back().push_back(static_cast<int>((next++)->tokens[0]));
    }
    return true;
}

bool Rounds::run(Round& round) {
    const Clock::time_point start = Clock::now();
    std::vector<Turn> turns;
    for (Drafted* one : requests_) turns.emplace_back(*one, growing_);
    for (Turn& turn : turns) {
        if (!turn.request.copies) continue;
        turn.request.copies->plant(turn.tree, turn.request.log_rates, turn.planted);
        turn.tree.finish_copies();
    }
    round.copy_seconds = since(start);
    if (!grow(turns, round)) return false;
    const Clock::time_point drafted = Clock::now();
    std::vector<std::vector<int>> picks;
    if (!verify(turns, picks)) return false;
    round.target_seconds = since(drafted);
    for (std::size_t n = 0; n < turns.size(); ++n) {
        round.outcomes.push_back(turns[n].outcome(picks[n]));
        turns[n].commit(round.outcomes.back());
    }
    round.seconds = since(start);
    return true;
}

}  // namespace

std::vector<Round> Pair::carry_out(const Side& target, const Side& draft, const Growing& growing, int proposed,
                                   const PassTimes& times, const std::vector<Drafted*>& requests, int most,
                                   double seconds) {
    std::lock_guard<std::mutex> alone(running_);
    Rounds all(target, draft, growing, proposed, times, requests, scores_);
    const Clock::time_point start = Clock::now();
    std::vector<Round> rounds;
    for (bool goes_on = true; goes_on && static_cast<int>(rounds.size()) < most && all.have_room();) {
        Round round{};
        if (!all.run(round)) break;
        for (std::size_t n = 0; n < requests.size(); ++n) goes_on &= !Rounds::ends(*requests[n], round.outcomes[n]);
        rounds.push_back(std::move(round));
        goes_on &= since(start) + rounds.back().seconds <= seconds;
    }
    return rounds;
}

}  // namespace outpace
