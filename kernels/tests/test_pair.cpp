// Whole rounds of a target and a draft model: the text equals plain decoding for any proposals, and both sessions hold
// the right keys and values.
#include <algorithm>
#include <cmath>

#include "by_hand.h"
#include "forests.h"
#include "pair.h"

namespace outpace {
namespace {

constexpr int kPositions = 96;
constexpr int kWritten = 30;

/// Returns the rotations of every position.
std::vector<float> turn_table(int depth) {
    std::vector<float> turns;
    for (int position = 0; position < kPositions; ++position)
        for (int i = 0; i < depth / 2; ++i) {
            const float half = static_cast<float>(position) / static_cast<float>(i + 1);
            turns.push_back((1 - half * half) / (1 + half * half));
            turns.push_back(2 * half / (1 + half * half));
        }
    return turns;
}

/// Picks a row's token: the best of x, or of x / T + noise.
int picked(const std::vector<float>& scores, const Noise& noise, std::size_t position) {
    if (!noise.is_there()) return static_cast<int>(std::max_element(scores.begin(), scores.end()) - scores.begin());
    std::vector<double> race;
    for (std::size_t token = 0; token < scores.size(); ++token)
        race.push_back(scores[token] / noise.temperature + noise_of(static_cast<int64_t>(token), noise.key(position)));
    return static_cast<int>(std::max_element(race.begin(), race.end()) - race.begin());
}

std::vector<int> plain_text(Model& model, const Sizes& sizes, std::vector<int> tokens, const Noise& noise) {
    for (int count = 0; count < kWritten; ++count)
        tokens.push_back(picked(fresh(model, sizes, tokens), noise, tokens.size()));
    return tokens;
}

Plan plan_of(double cost, int budget) {
    return {{1.0, 1.0, 1.0}, budget, 6, 0, 0.01, cost, 0.9, 0.01, -9.0, 0.0, {0.8, 0.7}, {true, false}};
}

/// One request's text and its sessions, which have all of it except the last token; the draft model has read nothing.
struct Text {
    std::vector<int> tokens;
    Store target, draft;
    Copies copies;
    Drafted drafted;

    Text(Model& model, const Sizes& sizes, const Sizes& draft_sizes, const std::vector<int>& prompt, const Plan& plan,
         const Noise& noise)
        : tokens(prompt),
          target(store_of(sizes)),
          draft(store_of(draft_sizes)),
          copies({3, 6, 2, 1000, -600.0, 8}),
          drafted{{&target, static_cast<int>(prompt.size()) - 1}, {&draft, 0}, {prompt.begin(), prompt.end() - 1},
                  {prompt.back()}, {kNoParent}, {0.0}, {1.0}, plan, 1, false, 60, kWritten, {}, &copies,
                  std::vector<double>(kCopyKinds, -0.2), noise, nullptr} {
        const int count = static_cast<int>(prompt.size()) - 1;
        score(model, {{&target, 0, chain(count), 0, {prompt.begin(), prompt.end() - 1}}});
        copies.extend(prompt);
    }
};

/// Whether a session equals a fresh one.
bool holds(Model& model, const Sizes& sizes, const Place& place, const std::vector<int>& tokens) {
    Store store = store_of(sizes);
    if (place.length) score(model, {{&store, 0, chain(place.length), 0, {tokens.begin(), tokens.begin() + place.length}}});
    const auto ours = held(*place.store, sizes, place.length), theirs = held(store, sizes, place.length);
    return same(ours.data(), theirs.data(), ours.size());
}

/// Returns the number of accepted tokens of all texts.
int check_rounds(Model& target, const Sizes& sizes, Model& draft, const Sizes& draft_sizes, double cost,
                 double temperature = 0.0) {
    const std::vector<float> turns = turn_table(sizes.depth), draft_turns = turn_table(draft_sizes.depth);
    const Side one{&target, nullptr, sizes.vocabulary, turns.data(), kPositions, kPositions - 1, sizes.vocabulary - 1};
    const Side other{&draft,    nullptr, draft_sizes.vocabulary, draft_turns.data(), kPositions, kPositions - 1,
                     draft_sizes.vocabulary - 1};
    std::vector<std::unique_ptr<Text>> texts;
    std::vector<Drafted*> requests;
    const auto keyed = [&](int number) {  // the middle one is greedy in any case
        return Noise{number == 1 ? 0.0 : temperature, 7u + static_cast<uint64_t>(number), 3};
    };
    for (int number = 0; number < 3; ++number) {
        auto prompt = text(5 + 3 * number, sizes.vocabulary, number);
        prompt.insert(prompt.end(), prompt.begin(), prompt.begin() + 4);  // something to copy
        const Plan plan = plan_of(cost, 4 + 2 * number);
        texts.push_back(std::make_unique<Text>(target, sizes, draft_sizes, prompt, plan, keyed(number)));
        requests.push_back(&texts.back()->drafted);
    }
    const PassTimes times{{1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8,
                           2.9, 3.0, 3.1, 3.2, 3.3, 3.4},
                          8,
                          {}};
    const Growing growing{3, 40, -12.0};
    Pair pair;
    int accepted = 0;
    const auto is_nearly_over = [](const Drafted* request) { return request->left < 10; };
    for (int calls = 0; std::none_of(requests.begin(), requests.end(), is_nearly_over); ++calls) {
        const auto rounds = pair.carry_out(one, other, growing, 5, times, requests, 1 + calls % 3, 1e9);
        check(!rounds.empty(), "a pair's rounds");
        for (const Round& round : rounds)
            for (std::size_t n = 0; n < texts.size(); ++n) {
                for (int place : round.outcomes[n].path) texts[n]->tokens.push_back(round.outcomes[n].picks[place]);
                accepted += static_cast<int>(round.outcomes[n].path.size()) - 1;
            }
    }
    for (const auto& text : texts) {
        const std::vector<int>& tokens = text->tokens;
        check(text->drafted.target.length == static_cast<int>(tokens.size()) - 1, "how much of a text is committed");
        check(holds(target, sizes, text->drafted.target, tokens), "what a target's session holds behind rounds");
        check(holds(draft, draft_sizes, text->drafted.draft, tokens), "what a draft's session holds behind rounds");
    }
    for (int number = 0; number < 3; ++number) {
        auto prompt = text(5 + 3 * number, sizes.vocabulary, number);
        prompt.insert(prompt.end(), prompt.begin(), prompt.begin() + 4);
        const std::vector<int> expected = plain_text(target, sizes, prompt, keyed(number));
        const std::vector<int>& got = texts[number]->tokens;
        const auto count = static_cast<int64_t>(std::min(got.size(), expected.size()));
        check(got.size() > prompt.size() + 5 && std::equal(got.begin(), got.begin() + count, expected.begin()),
              "the text of a pair's rounds");
    }
    return accepted;
}

/// Values that are probabilities, and values that are not.
void check_chances() {
    const auto together = [](const ChoiceFit& fit) {
        double total = 0.0;
        for (double value : log_chances(fit, {std::log(0.5), std::log(0.2)}, 2)) total += std::exp(value);
        return total;
    };
    check(std::fabs(together({1.0, 2.0, 0.9}) - 0.4) < 1e-12, "what shares leave open, as a multiple");
    check(std::fabs(together({1.0, -1.0, 0.9}) - 0.9) < 1e-12, "values that are no shares");
}

/// Copies of a text in which the last three tokens occurred at three of the places looked at; at the oldest, two more
/// tokens match.
void check_copies() {
    const std::vector<int> text{7, 8, 1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3};
    const Plan plan = plan_of(0.1, 8);
    const Growing growing{3, 40, -12.0};
    const auto copied = [&](int places, int window) {
        PlannedTree tree(plan, growing, {3}, {kNoParent}, {0.0}, {1.0});
        std::vector<Planted> planted;
        Copies copies({3, 1, 2, window, -600.0, places});
        copies.extend(text);
        copies.plant(tree, std::vector<double>(kCopyKinds, -0.2), planted);
        std::vector<int> tokens;
        for (int node = 1; node < tree.size(); ++node) tokens.push_back(tree.token(node));
        return tokens;
    };
    check(copied(3, 100) == std::vector<int>{4, 6}, "the longest match of all places");
    check(copied(2, 100) == std::vector<int>{6, 5}, "the latest of equal matches");
    check(copied(3, 15) == std::vector<int>{6, 5}, "no place before the window");
}

}  // namespace

void test_pair() {
    check_chances();
    check_copies();
    const Sizes sizes{97, 48, 80, 2, 6, 2, 8, KvFormat::float32, false};
    const Sizes other{97, 64, 64, 1, 4, 2, 16, KvFormat::float32, false};
    const Kernels* kernels = find_kernels("");
    const auto target = make_model(sizes, kernels, 2), same_one = make_model(sizes, kernels, 2);
    const auto bad = make_model(other, kernels, 1);
    check(check_rounds(*target, sizes, *same_one, sizes, 0.001) > 20, "a draft that is right is accepted");
    check_rounds(*target, sizes, *bad, other, 0.001);
    check_rounds(*target, sizes, *bad, other, 0.6);
    check(check_rounds(*target, sizes, *same_one, sizes, 0.001, 0.7) > 20, "a draft with the same noise is accepted");
    check_rounds(*target, sizes, *bad, other, 0.001, 1.3);
}

}  // namespace outpace
