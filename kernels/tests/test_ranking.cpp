// The best of a row against their definition over all tokens, for every instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "kernels.h"

namespace outpace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// As outpace/core/noise.py says it: a hash of the token under the key's halves, then g = -log(-log(1 - v)).
double noise_of(int64_t token, uint64_t key) {
    auto bits = static_cast<uint32_t>(token) ^ static_cast<uint32_t>(key);
    for (const uint32_t factor : {0x7feb352du, 0x846ca68bu, 0x9e485565u}) {
        bits *= factor;
        bits ^= bits >> 15;
        if (factor == 0x7feb352du) bits ^= static_cast<uint32_t>(key >> 32);
    }
    const float half = static_cast<float>(bits & 0x7fffffffu) + 0.5f;
    const double v = half * static_cast<float>(std::ldexp(1 - std::ldexp(1.0, -23), -31));
    return -std::log(-std::log1p(-v));
}

/// All tokens of a row that are possible, best first, with `sum` the log of the sum of e^(x / T).
std::vector<Ranked> definition(const Ranking& task, double* sum) {
    const float top = *std::max_element(task.scores, task.scores + task.held);
    std::vector<Ranked> all;
    double total = 0;
    for (int place = 0; place < task.held; ++place) {
        const int64_t token = task.tokens ? task.tokens[place] : place;
        const double beside = (static_cast<double>(task.scores[place]) - top) / task.temperature;
        const double luck = task.key ? noise_of(token, *task.key) : 0;
        if (task.scores[place] > -kInfinity) all.push_back({token, beside + luck});
        total += std::exp(beside);
    }
    std::stable_sort(all.begin(), all.end(), [](const Ranked& a, const Ranked& b) { return a.value > b.value; });
    const double shift = task.whole ? -std::log(total) : top / task.temperature;
    for (Ranked& one : all) one.value += shift;
    *sum = std::log(total);
    return all;
}

void check_row(const Ranking& task, int count) {
    double sum = 0;
    const std::vector<Ranked> expected = definition(task, &sum);
    const std::size_t possible = std::min(expected.size(), static_cast<std::size_t>(count));
    std::vector<Ranked> first;
    for (const Kernels* kernels : available_kernels()) {
        std::vector<Ranked> best(count);
        best.resize(kernels->rank(task, count, best.data()));
        check(best.size() == possible, "as many of a row are found as are asked for and possible");
        for (std::size_t i = 0; i < best.size(); ++i) {
            check(best[i].token == expected[i].token, "the best of a row, in their order");
            const double off = std::fabs(best[i].value - expected[i].value);
            check(off <= (task.whole ? 2e-6 : 1e-15 * std::fabs(expected[i].value)), "values of the best of a row");
        }
        if (first.empty()) first = best;
        check(!std::memcmp(first.data(), best.data(), best.size() * sizeof(Ranked)), kernels->name);
    }
}

/// Flat, peaked, tied, far from 0, half of it impossible, all equal, rising.
std::vector<float> row_of(int kind, int held, std::mt19937& random) {
    std::vector<float> x(held);
    for (int i = 0; i < held; ++i) {
        const float part = static_cast<float>(random() >> 8) * 0x1p-24f;
        const float far = 3e4f + part, rising = static_cast<float>(i) * 0.01f;
        const float kinds[] = {part * 6, part * part * 60, std::floor(part * 5), far, part * 6, -2.0f, rising};
        x[i] = kind == 4 && random() % 2 ? -kInfinity : kinds[kind];
    }
    x[random() % held] = kind == 4 ? 1.0f : x[0];
    return x;
}

void test_rows() {
    std::mt19937 random(11);
    for (const int held : {1, 2, 15, 16, 17, 63, 64, 65, 130, 1000})
        for (int kind = 0; kind < 7; ++kind) {
            const std::vector<float> x = row_of(kind, held, random);
            std::vector<int64_t> tokens(held);
            for (int i = 0; i < held; ++i) tokens[i] = 7 + 3 * i;
            const uint64_t key = static_cast<uint64_t>(random()) << 32 | random();
            for (const int count : {1, 2, 8, held})
                for (int mode = 0; count <= held && mode < 8; ++mode)
                    check_row({x.data(), mode & 1 ? tokens.data() : nullptr, held, mode & 2 ? 0.8 : 2.5,
                               mode & 4 ? &key : nullptr, mode % 3 != 0}, count);
        }
}

void test_rows_without_an_order() {
    for (const Kernels* kernels : available_kernels())
        for (const float odd : {kInfinity, std::nanf("")})
            for (int place = 0; place < 100; ++place) {
                std::vector<float> x(100, 1.0f);
                Ranked best[2];
                x[place] = odd;
                check(!kernels->rank({x.data(), nullptr, 100, 1.0, nullptr, true}, 2, best), "a row without an order");
                x.assign(100, -kInfinity);
                check(!kernels->rank({x.data(), nullptr, 100, 1.0, nullptr, true}, 2, best), "a row of nothing");
            }
}

}  // namespace

void test_ranking() {
    test_rows();
    test_rows_without_an_order();
}

}  // namespace outpace
