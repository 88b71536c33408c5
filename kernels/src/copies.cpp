#include "copies.h"

#include <algorithm>
#include <iterator>

namespace outpace {
namespace {

// The same constants as in the Python drafter.
constexpr int kCounted = 64;
constexpr int kLengths[] = {0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65};
constexpr int kGrades = 3;
enum Grade { kSure = 0, kOther = 2 };

int kind_of(int length, Grade grade) {
    const auto number = std::upper_bound(std::begin(kLengths), std::end(kLengths), length) - std::begin(kLengths) - 1;
    return static_cast<int>(number) * kGrades + grade;
}

bool has(const Planted& below, int token) {
    return std::any_of(below.begin(), below.end(), [&](const auto& one) { return one.first == token; });
}

void note(Planted& below, int token, int kind) {
    if (!has(below, token)) below.emplace_back(token, kind);
}

}  // namespace

Copies::Copies(const Copying& copying) : copying_(copying) {}

/// Encodes the n-gram that ends at a position: tokens of up to 21 bits each.
uint64_t Copies::key(int end, int length) const {
    uint64_t bits = 0;
    for (int at = end - length; at < end; ++at) bits = bits << 21 | static_cast<uint64_t>(tokens_[at]);
    return bits;
}

void Copies::extend(const std::vector<int>& tokens) {
    for (int token : tokens) {
        tokens_.push_back(token);
        const int place = size() - 1;
        for (int length = 1; length <= copying_.longest; ++length) {
            Chains& chains = chains_[length - 1];
            if (place < length) {
                chains.before.push_back(-1);
                continue;
            }
            const auto [at, is_new] = chains.heads.try_emplace(key(place, length), place);
            chains.before.push_back(is_new ? -1 : std::exchange(at->second, place));
        }
    }
}

/// Finds earlier places of the last tokens. Among the places looked at, those of the longest n-gram and the latest come
/// first; the ones with the longest matches are returned.
std::vector<Copies::Match> Copies::matches() const {
    std::vector<Match> found;
    const int count = copying_.places, oldest = std::max(size() - copying_.window, 0);
    const int most = std::min(kCounted, size());
    for (int length = std::min(copying_.longest, size()); length >= 1; --length) {
        const Chains& chains = chains_[length - 1];
        const auto head = chains.heads.find(key(size(), length));
        int place = head == chains.heads.end() ? -1 : head->second;
        for (int left = 2 * count; place >= oldest && left && static_cast<int>(found.size()) < count; --left) {
            int same = 0;
            while (same < std::min(most, place) && tokens_[place - same - 1] == tokens_[size() - same - 1]) ++same;
            const auto is_here = [&](const Match& match) { return match.place == place; };
            if (std::none_of(found.begin(), found.end(), is_here)) found.push_back({same, place});
            place = chains.before[place];
        }
    }
    const auto is_longer = [](const Match& one, const Match& other) { return one.length > other.length; };
    std::stable_sort(found.begin(), found.end(), is_longer);
    if (static_cast<int>(found.size()) > copying_.branches) found.resize(copying_.branches);
    return found;
}

void Copies::plant(PlannedTree& tree, const std::vector<double>& log_rates, std::vector<Planted>& planted) const {
    planted.resize(tree.size());
    bool is_first = true;
    for (const Match& match : matches()) {
        branch(tree, match, is_first, log_rates, planted);
        is_first = false;
    }
}

/// Adds the tokens that follow a place as a chain below the root. Its grade is that of the first token that no other
/// branch shares.
void Copies::branch(PlannedTree& tree, const Match& match, bool is_first, const std::vector<double>& log_rates,
                    std::vector<Planted>& planted) const {
    Grade grade = is_first ? kSure : kOther;
    const int end = std::min(match.place + copying_.tokens, size());
    const int count = end - match.place;
    const int* tokens = tokens_.data() + match.place;
    int node = 0, place = 0;
    for (int child; place < count && (child = tree.child(node, tokens[place])) >= 0; ++place) {
        const int kind = kind_of(match.length + place, grade);
        if (tree.score(node) + log_rates[kind] < copying_.least) return;
        if (!has(planted[node], tokens[place])) {
            planted[node].emplace_back(tokens[place], kind);
            grade = kSure;
        }
        node = child;
    }
    double score = tree.score(node);
    for (int at = place; at < count; ++at) {
        const int kind = kind_of(match.length + at, grade);
        score += log_rates[kind];
        if (score < copying_.least) return;
        if (at > place || !has(planted[node], tokens[place])) grade = kSure;
        note(planted[node], tokens[at], kind);
        node = tree.copy(node, tokens[at], score);
        planted.emplace_back();
    }
}

}  // namespace outpace
