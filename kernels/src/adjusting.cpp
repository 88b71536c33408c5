#include "adjusting.h"

#include <algorithm>
#include <limits>

namespace outpace {
namespace {

/// Returns the index of a token in rows, or a negative number.
int column_of(const int64_t* names, int held, int token) {
    if (!names) return token < held ? token : -1;
    const int64_t* place = std::lower_bound(names, names + held, static_cast<int64_t>(token));
    return place < names + held && *place == token ? static_cast<int>(place - names) : -1;
}

float* at(float* scores, int column) { return column < 0 ? nullptr : scores + column; }

float* find(float* scores, const int64_t* names, int held, int token) { return at(scores, column_of(names, held, token)); }

}  // namespace

void Adjusting::extend(const std::vector<int>& tokens) {
    for (int token : tokens) {
        const bool is_answer = size_++ >= asked_.prompt;
        if (!asked_.repeats() && !(asked_.counts() && is_answer)) continue;
        const auto [found, is_new] = places_.try_emplace(token, written_.size());
        if (is_new) written_.push_back({token, 0});
        written_[found->second].count += is_answer;
    }
}

float Adjusting::penalised(float score, int count) const {
    if (asked_.repeats()) score = score > 0.0f ? score / asked_.repetition : score * asked_.repetition;
    if (!count || !asked_.counts()) return score;
    const float repeated = asked_.frequency * static_cast<float>(count);
    return score - (asked_.presence + repeated);
}

void Adjusting::locate(const int64_t* names, int held) {
    if (!names) return;
    if (names != names_ || held != held_) columns_.clear();
    names_ = names, held_ = held;
    for (std::size_t n = columns_.size(); n < written_.size(); ++n)
        columns_.push_back(column_of(names, held, written_[n].token));
}

float* Adjusting::score_of(float* scores, const int64_t* names, int held, std::size_t written) const {
    if (!names || names != names_ || held != held_ || written >= columns_.size())
        return find(scores, names, held, written_[written].token);
    return at(scores, columns_[written]);
}

void Adjusting::apply(float* scores, const int64_t* names, int held, const std::vector<int>& path) const {
    for (const auto& [token, value] : asked_.bias)
        if (float* score = find(scores, names, held, token)) *score += value;
    if (asked_.repeats() || asked_.counts()) {
        std::vector<std::pair<float*, float>> drafted;  // previous logits of drafted tokens
        for (std::size_t n = 0; n < path.size(); ++n) {
            float* score = find(scores, names, held, path[n]);
            if (!score || std::find(path.begin(), path.begin() + n, path[n]) != path.begin() + n) continue;
            const auto found = places_.find(path[n]);
            const int before = found == places_.end() ? 0 : written_[found->second].count;
            const int count = before + static_cast<int>(std::count(path.begin(), path.end(), path[n]));
            drafted.emplace_back(score, penalised(*score, count));
        }
        for (std::size_t n = 0; n < written_.size(); ++n)
            if (float* score = score_of(scores, names, held, n)) *score = penalised(*score, written_[n].count);
        for (const auto& [score, value] : drafted) *score = value;
    }
    if (size_ + static_cast<int>(path.size()) - asked_.prompt >= asked_.min_tokens) return;
    for (int stop : asked_.stops)
        if (float* score = find(scores, names, held, stop)) *score = -std::numeric_limits<float>::infinity();
}

}  // namespace outpace
