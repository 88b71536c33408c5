// The best tokens of a row compared with their definition over all tokens, for every instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "by_hand.h"
#include "check.h"
#include "kernels.h"

namespace outpace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Returns all possible tokens of a row, best first, with `sum` the log of the sum of e^(x / T).
std::vector<Ranked> definition(const Ranking& task, double* sum) {
    const float top = *std::max_element(task.scores, task.scores + task.size);
    std::vector<Ranked> all;
    double total = 0;
    for (int place = 0; place < task.size; ++place) {
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

/// Computes which tokens filters keep; returns false if another order of summation may differ.
bool left_by(const Ranking& task, std::vector<char>& is_left) {
    const auto temperature = static_cast<float>(task.temperature);
    std::vector<float> y;
    for (int place = 0; place < task.size; ++place) y.push_back(task.scores[place] / temperature);
    std::vector<float> falling(y);
    std::sort(falling.begin(), falling.end(), std::greater<>());
    const Filters& filters = task.filters;
    const std::size_t limit = filters.top_k ? std::min<std::size_t>(filters.top_k, y.size()) : y.size();
    float floor = falling[limit - 1];
    bool is_clear = true;
    if (filters.top_p < 1.0) {
        double total = 0.0, mass = 0.0;
        for (std::size_t i = 0; i < limit; ++i) total += std::exp(static_cast<double>(falling[i]) - falling[0]);
        std::size_t last = 0;
        for (;; ++last) {
            mass += std::exp(static_cast<double>(falling[last]) - falling[0]) / total;
            is_clear = is_clear && std::fabs(mass - filters.top_p) > 2e-4 + 5e-7 * std::fabs(falling[0]);
            if (mass >= filters.top_p || last + 1 == limit) break;
        }
        floor = std::max(floor, falling[last]);
    }
    if (filters.min_p > 0.0) {
        const double threshold = falling[0] + std::log(filters.min_p);
        for (float one : y) is_clear = is_clear && std::fabs(one - threshold) > 1e-5 * (1 + std::fabs(falling[0]));
        floor = std::max(floor, static_cast<float>(threshold));
    }
    is_left.clear();
    for (float one : y) is_left.push_back(one >= floor && one > -kInfinity);
    return is_clear;
}

/// Checks the best tokens after filters, with and without noise.
int check_filters(const Ranking& task, int count) {
    std::vector<char> is_left;
    const bool is_clear = left_by(task, is_left);
    std::vector<float> rest;  // the definition divides in float32
    for (int place = 0; place < task.size; ++place)
        rest.push_back(is_left[place] ? task.scores[place] / static_cast<float>(task.temperature) : -kInfinity);
    double sum = 0;
    Ranking bare = task;
    bare.scores = rest.data();
    bare.temperature = 1.0;
    bare.filters = {0, 1.0, 0.0};
    const std::vector<Ranked> expected = definition(bare, &sum);
    const std::size_t possible = std::min(expected.size(), static_cast<std::size_t>(count));
    std::vector<Ranked> first;
    int found = 0;
    for (const Kernels* kernels : available_kernels()) {
        std::vector<Ranked> best(count);
        best.resize(kernels->rank(task, count, best.data()));
        check(!is_clear || best.size() == possible, "as many are found as filters leave");
        for (std::size_t i = 0; is_clear && i < best.size(); ++i) {
            check(best[i].token == expected[i].token, "the best of what filters leave, in their order");
            check(std::fabs(best[i].value - expected[i].value) <= 2e-6 * (1 + std::fabs(expected[i].value)),
                  "values of what filters leave");
        }
        if (kernels == available_kernels().front()) first = best;
        check(first.size() == best.size() && !std::memcmp(first.data(), best.data(), best.size() * sizeof(Ranked)),
              kernels->name);
        found += is_clear && !best.empty();
    }
    return found;
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

/// Returns a row that is flat, peaked, tied, far from 0, half impossible, all equal, or rising.
std::vector<float> row_of(int kind, int size, std::mt19937& random) {
    std::vector<float> x(size);
    for (int i = 0; i < size; ++i) {
        const float part = static_cast<float>(random() >> 8) * 0x1p-24f;
        const float far = 3e4f + part, rising = static_cast<float>(i) * 0.01f;
        const float kinds[] = {part * 6, part * part * 60, std::floor(part * 5), far, part * 6, -2.0f, rising};
        x[i] = kind == 4 && random() % 2 ? -kInfinity : kinds[kind];
    }
    x[random() % size] = kind == 4 ? 1.0f : x[0];
    return x;
}

void test_rows() {
    std::mt19937 random(11);
    for (const int size : {1, 2, 15, 16, 17, 63, 64, 65, 130, 1000})
        for (int kind = 0; kind < 7; ++kind) {
            const std::vector<float> x = row_of(kind, size, random);
            std::vector<int64_t> tokens(size);
            for (int i = 0; i < size; ++i) tokens[i] = 7 + 3 * i;
            const uint64_t key = static_cast<uint64_t>(random()) << 32 | random();
            for (const int count : {1, 2, 8, size})
                for (int mode = 0; count <= size && mode < 8; ++mode)
                    check_row({x.data(), mode & 1 ? tokens.data() : nullptr, size, mode & 2 ? 0.8 : 2.5,
                               mode & 4 ? &key : nullptr, mode % 3 != 0}, count);
        }
}

void test_filters() {
    std::mt19937 random(12);
    int found = 0;
    for (const int size : {1, 2, 17, 64, 130, 1000, 5000})
        for (int kind = 0; kind < 7; ++kind) {
            const std::vector<float> x = row_of(kind, size, random);
            std::vector<int64_t> tokens(size);
            for (int i = 0; i < size; ++i) tokens[i] = 7 + 3 * i;
            const uint64_t key = static_cast<uint64_t>(random()) << 32 | random();
            const Filters some[] = {{1, 1.0, 0.0},  {7, 1.0, 0.0},   {600, 0.9, 0.0}, {0, 0.95, 0.0}, {0, 0.3, 0.0},
                                    {0, 1.0, 0.07}, {50, 0.8, 0.02}, {9000, 1.0, 0.0}, {0, 0.999, 0.3}};
            for (const Filters& filters : some)
                for (int mode = 0; mode < 8; ++mode)
                    found += check_filters({x.data(), mode & 1 ? tokens.data() : nullptr, size, mode & 2 ? 0.4 : 2.5,
                                            mode & 4 ? &key : nullptr, true, filters},
                                           std::min(size, 3));
        }
    check(found > 2000, "rows of which filters leave something");
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
    test_filters();
    test_rows_without_an_order();
}

}  // namespace outpace
