#include "pair.h"

#include <algorithm>
#include <chrono>

#include "turn.h"

namespace outpace {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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
            const int expanded = std::min(growing_.width * one->plan.deepest, growing_.tree_nodes);
            const int grown = one->plan.deepest ? expanded + read : 0;
            // the rotation table, which sessions reach into
            const bool is_short = target_.positions <= target_.last_position;
            const int slots = one->target.store->slots(), most = is_short ? std::min(slots, target_.positions) : slots;
            if (one->target.length + one->plan.budget > most) return false;
            if (one->draft.length + grown > one->draft.store->slots()) return false;
        }
        return true;
    }

    /// Runs a round. Returns false if a row has no order or is too close to call. Then only missing tokens that the
    /// draft model read may have been committed.
    bool run(Round& round);

    /// Whether a request is finished.
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
    bool has_tried_ = false;  // fewer nodes were verified than pay; once per call is enough
};

/// Adds layers while they pay, for all requests that want one in the same forward.
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
        round.forwards.push_back({since(start), static_cast<int>(asking.size()), is_step});
        for (std::size_t n = 0; n < asking.size(); ++n) {
            asking[n]->is_done = asking[n]->tree.size() == before[n];
            if (!asking[n]->is_done) asking[n]->tree.finish_layer(times_, others(turns, *asking[n]));
        }
    }
}

/// Runs one draft forward, and another one for a tree to which it added nothing because all proposals were there
/// already.
bool Rounds::expand(std::vector<Turn*> jobs) {
    while (true) {
        Rows rows(draft_);
        std::vector<Turn*> again;
        for (Turn* turn : jobs) {
            turn->frontier = turn->tree.frontier(turn->request.most_depth);
            if (turn->frontier.empty() || !turn->has_slots()) continue;
            turn->add_to(rows);
            again.push_back(turn);
        }
        if (again.empty()) return true;
        std::vector<Proposals> best;
        if (!rows.run(proposed_, scores_, best)) return false;
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
    for (Turn& turn : turns) {
        turn.nodes = turn.tree.choose(times_, others(turns, turn), !has_tried_, turn.fewer);
        has_tried_ |= turn.fewer;
    }
    for (const Turn& turn : turns) turn.add_chosen(rows);
    std::vector<Proposals> best;
    if (!rows.run(1, scores_, best)) return false;
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
