// Adjusted logits compared with a token by token computation.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "adjusting.h"
#include "check.h"

namespace outpace {
namespace {

using Random = std::mt19937;

constexpr int kTokens = 40;

/// Adjusts one logit as core/adjust.py does.
float by_hand(float score, int token, const Adjustments& asked, const std::vector<int>& text, const std::vector<int>& path) {
    for (const auto& [biased, value] : asked.bias)
        if (biased == token) score = score + value;
    std::vector<int> whole(text), answer(text.begin() + asked.prompt, text.end());
    whole.insert(whole.end(), path.begin(), path.end());
    answer.insert(answer.end(), path.begin(), path.end());
    if (asked.repetition != 1.0f && std::count(whole.begin(), whole.end(), token))
        score = score > 0.0f ? score / asked.repetition : score * asked.repetition;
    const auto count = std::count(answer.begin(), answer.end(), token);
    if (count) {
        const float repeated = asked.frequency * static_cast<float>(count);
        score = score - (asked.presence + repeated);
    }
    const bool is_early = static_cast<int>(answer.size()) < asked.min_tokens;
    return is_early && std::count(asked.stops.begin(), asked.stops.end(), token) ? -INFINITY : score;
}

void test_rows(Random& random, const Adjustments& asked) {
    std::vector<int> text;
    std::vector<int64_t> names;
    for (int token = 0; token < kTokens; ++token)
        if (token % 3) names.push_back(token);
    Adjusting adjusting(asked);
    for (int round = 0; round < 6; ++round) {
        std::vector<int> more(1 + random() % 7), path(random() % 4);
        for (int& token : more) token = static_cast<int>(random() % (kTokens + 5));  // some tokens have no logit
        for (int& token : path) token = static_cast<int>(random() % (kTokens + 5));
        text.insert(text.end(), more.begin(), more.end());
        adjusting.extend(more);
        check(adjusting.size() == static_cast<int>(text.size()), "the text is known");
        if (static_cast<int>(text.size()) < asked.prompt) continue;
        if (random() % 2) adjusting.locate(names.data(), static_cast<int>(names.size()));
        for (const std::vector<int64_t>* held : {static_cast<std::vector<int64_t>*>(nullptr), &names}) {
            const int count = held ? static_cast<int>(held->size()) : kTokens;
            std::vector<float> scores(count), expected(count);
            for (int at = 0; at < count; ++at) {
                scores[at] = static_cast<float>(random() % 4000) * 0.01f - 20.0f;
                expected[at] = by_hand(scores[at], held ? static_cast<int>((*held)[at]) : at, asked, text, path);
            }
            adjusting.apply(scores.data(), held ? held->data() : nullptr, count, path);
            check(scores == expected, "each score is adjusted as it is by hand");
        }
    }
}

}  // namespace

void test_adjusting() {
    Random random(21);
    for (int repeat = 0; repeat < 40; ++repeat)
        for (float repetition : {1.0f, 1.3f, 0.8f})
            for (float presence : {0.0f, 0.6f})
                for (float frequency : {0.0f, -0.25f})
                    test_rows(random, {{{3, 1.5f}, {7, -4.0f}, {44, 2.0f}}, repetition, presence, frequency, repeat % 3 * 6, {5, 8}, repeat % 4});
}

}  // namespace outpace
