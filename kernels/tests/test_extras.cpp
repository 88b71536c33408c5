// Optional features of passes: hidden states, logits of hidden states, skipped sublayers, gaps, vectors, MLP biases. Each
// is compared with a pass without it, and all together with one fingerprint.
#include <algorithm>

#include "forests.h"

namespace outpace {
namespace {

using Floats = std::vector<float>;

/// Space for hidden states of some rows after some layers.
struct HiddenStates {
    std::vector<int> rows, layers;
    Floats out;
    int size;

    HiddenStates(const Model& model, std::vector<int> rows, std::vector<int> layers)
        : rows(std::move(rows)), layers(std::move(layers)), size(model.shape().hidden) {
        out.resize(this->rows.size() * this->layers.size() * size);
    }
    HiddenRequest request() {
        return {rows.data(), static_cast<int>(rows.size()), layers.data(), static_cast<int>(layers.size()), out.data()};
    }
    const float* at(int layer, int row) const { return out.data() + (layer * rows.size() + row) * size; }
};

Floats project(Model& model, const float* hidden, int rows) {
    Floats scores(static_cast<std::size_t>(rows) * model.outputs());
    model.project(hidden, rows, scores.data());
    return scores;
}

/// Returns a fingerprint of one forest that uses all features.
Floats everything(Model& model, const Sizes& sizes) {
    Store first = store_of(sizes), second = store_of(sizes), third = store_of(sizes);
    for (Store* store : {&first, &second, &third})
        score(model, {{store, 0, chain(20), 0, text(20, sizes.vocabulary, 3)}});
    Random random(11);
    const Floats inputs = numbers(random, static_cast<std::size_t>(13) * sizes.hidden, 0, 0.3f);
    const Floats mlp_bias = numbers(random, static_cast<std::size_t>(sizes.layers) * model.shape().middle, 0, 0.5f);
    HiddenStates hidden(model, {0, 5, 12, 14, 27}, {0, 2, 1});
    const bool skipped[] = {false, true, true, false};
    const auto nodes = text(13, sizes.vocabulary, 4);
    const std::vector<Part> parts = {{&first, 20, kTree, 0, nodes}, {&second, 20, kTree, 0, nodes, 9},
                                     {&third, 20, {-1, 0, 0}, 0, {1, 2, 3}}};
    Floats got = score(model, parts, [&](Forest& forest) {
        forest.spans[0].inputs = inputs.data();
        forest.spans[1].mlp_bias = mlp_bias.data();
        forest.hidden_request = hidden.request();
    });
    got.insert(got.end(), hidden.out.begin(), hidden.out.end());
    const Floats less = score(model, parts, [&](Forest& forest) { forest.skipped = skipped; });
    got.insert(got.end(), less.begin(), less.end());
    return got;
}

/// Hidden states of a tree equal those of its paths, those after the last layer give the logits, and requesting them
/// changes no logits.
void test_hidden_request(Model& model, const Sizes& sizes) {
    const auto prompt = text(20, sizes.vocabulary, 3), nodes = text(13, sizes.vocabulary, 4);
    Store store = store_of(sizes);
    score(model, {{&store, 0, chain(20), 0, prompt}});
    const auto plain = score(model, {{&store, 20, kTree, 0, nodes}});
    HiddenStates hidden(model, {0, 4, 12, 7}, {2, 0, 1});
    const auto with_hidden = score(model, {{&store, 20, kTree, 0, nodes}}, [&](Forest& f) { f.hidden_request = hidden.request(); });
    check(same(plain.data(), with_hidden.data(), plain.size()), "scores do not depend on requested hidden states");
    for (int place = 0; place < 4; ++place) {
        std::vector<int> path;
        for (int at = hidden.rows[place]; at >= 0; at = kTree[at]) path.insert(path.begin(), nodes[at]);
        path.insert(path.begin(), prompt.begin(), prompt.end());
        const int length = static_cast<int>(path.size());
        Store own = store_of(sizes);
        HiddenStates alone(model, {length - 1}, {2, 0, 1});
        score(model, {{&own, 0, chain(length), 0, path}}, [&](Forest& f) { f.hidden_request = alone.request(); });
        for (int layer = 0; layer < 3; ++layer)
            check(same(alone.at(layer, 0), hidden.at(layer, place), sizes.hidden), "hidden states of a tree's path");
        const auto projected = project(model, hidden.at(0, place), 1);
        check(same(projected.data(), plain.data() + static_cast<std::size_t>(hidden.rows[place]) * sizes.vocabulary,
                   projected.size()), "scores of the last layer's hidden states");
    }
    const auto together = project(model, hidden.at(0, 0), 4);
    for (int place = 0; place < 4; ++place)
        check(same(together.data() + static_cast<std::size_t>(place) * sizes.vocabulary,
                   plain.data() + static_cast<std::size_t>(hidden.rows[place]) * sizes.vocabulary, sizes.vocabulary),
              "scores of several hidden states at once");
}

/// After a gap a tree has the logits that it has after the shorter text, and committed slots are unchanged.
void test_gap(Model& model, const Sizes& sizes) {
    const auto prompt = text(30, sizes.vocabulary, 3), nodes = text(13, sizes.vocabulary, 4);
    Store whole = store_of(sizes);
    score(model, {{&whole, 0, chain(30), 0, prompt}});
    const auto before = contents(whole, sizes, 30);
    for (int length : {0, 7, 30}) {
        Store part = store_of(sizes);
        if (length) score(model, {{&part, 0, chain(length), 0, {prompt.begin(), prompt.begin() + length}}});
        const auto expected = score(model, {{&part, length, kTree, 0, nodes}});
        const auto got = score(model, {{&whole, 30, kTree, 0, nodes, 30 - length}});
        check(same(got.data(), expected.data(), got.size()), "behind a gap as behind the shorter text");
        check(contents(whole, sizes, 30) == before, "committed slots stay behind a gap");
    }
}

/// Skipping the last layer gives the output of the layer before it; skipping all gives the embedding.
void test_skipping(Model& model, const Sizes& sizes) {
    const auto tokens = text(13, sizes.vocabulary, 4);
    Store store = store_of(sizes), other = store_of(sizes);
    HiddenStates hidden(model, {12}, {0, 1});
    const bool none[] = {false, false, false, false}, last[] = {false, false, true, true},
               all[] = {true, true, true, true};
    const auto plain = score(model, {{&store, 0, kTree, 0, tokens}}, [&](Forest& f) { f.hidden_request = hidden.request(); });
    const auto skip = [&](const bool* skipped) {
        return score(model, {{&other, 0, kTree, 0, tokens}}, [&](Forest& f) { f.skipped = skipped; });
    };
    const std::size_t last_row = 12 * static_cast<std::size_t>(sizes.vocabulary);
    const auto row = [&](const Floats& scores) { return scores.data() + last_row; };
    check(same(skip(none).data(), plain.data(), plain.size()), "nothing is skipped");
    check(same(row(skip(last)), project(model, hidden.at(1, 0), 1).data(), sizes.vocabulary), "the last is skipped");
    check(same(row(skip(all)), project(model, hidden.at(0, 0), 1).data(), sizes.vocabulary), "all layers are skipped");
    const bool attention[] = {true, false, true, false};
    check(!same(row(skip(attention)), row(skip(all)), sizes.vocabulary), "MLPs stay where attention is skipped");
}

/// A token's own embedding as input equals the token; another session in the same pass is unaffected by it and by
/// MLP biases.
void test_inputs_and_mlp_bias(Model& model, const Sizes& sizes) {
    const auto tokens = text(9, sizes.vocabulary, 4), others = text(9, sizes.vocabulary, 5);
    Store store = store_of(sizes), beside = store_of(sizes);
    HiddenStates hidden(model, {0, 1, 2, 3, 4, 5, 6, 7, 8}, {0});
    const auto plain = score(model, {{&store, 0, chain(9), 0, tokens}}, [&](Forest& f) { f.hidden_request = hidden.request(); });
    const auto alone = score(model, {{&beside, 0, chain(9), 0, tokens}});
    const std::vector<Part> two = {{&store, 0, chain(9), 0, others}, {&beside, 0, chain(9), 0, tokens}};
    const auto vectors = score(model, two, [&](Forest& f) { f.spans[0].inputs = hidden.out.data(); });
    check(same(vectors.data(), plain.data(), plain.size()), "embeddings in place of tokens");
    check(same(vectors.data() + plain.size(), alone.data(), alone.size()), "vectors of another session");
    Random random(5);
    const Floats mlp_bias = numbers(random, static_cast<std::size_t>(sizes.layers) * model.shape().middle, 0, 0.5f);
    const std::vector<Part> again = {{&store, 0, chain(9), 0, tokens}, {&beside, 0, chain(9), 0, tokens}};
    const auto biased = score(model, again, [&](Forest& f) { f.spans[0].mlp_bias = mlp_bias.data(); });
    check(!same(biased.data(), plain.data(), sizes.vocabulary), "MLP biases have an effect");
    check(same(biased.data() + plain.size(), alone.data(), alone.size()), "MLP biases of another session");
    Floats only_last = mlp_bias;
    std::fill(only_last.begin(), only_last.end() - model.shape().middle, 0.0f);
    const auto late = score(model, again, [&](Forest& f) { f.spans[0].mlp_bias = only_last.data(); });
    check(!same(late.data(), plain.data(), sizes.vocabulary) && !same(late.data(), biased.data(), sizes.vocabulary),
          "every layer has its own bias");
}

/// Logits of some rows equal those when all are wanted, and all keys and values are stored, whatever else is requested.
void test_some_rows(Model& model, const Sizes& sizes) {
    const auto prompt = text(20, sizes.vocabulary, 3), nodes = text(13, sizes.vocabulary, 4);
    Random random(5);
    const Floats mlp_bias = numbers(random, static_cast<std::size_t>(sizes.layers) * model.shape().middle, 0, 0.5f);
    const bool no_mlp[] = {false, false, false, true}, no_attention[] = {false, false, true, false};
    Store first = store_of(sizes), second = store_of(sizes);
    for (Store* store : {&first, &second}) score(model, {{store, 0, chain(20), 0, prompt}});
    const std::vector<Part> parts = {{&first, 20, kTree, 0, nodes}, {&second, 20, chain(13), 0, nodes, 9}};
    for (const bool* skipped : {static_cast<const bool*>(nullptr), no_mlp, no_attention})
        for (const std::vector<int>& layers : std::vector<std::vector<int>>{{}, {1}, {0, 2}}) {
            const auto run = [&](const std::vector<int>& wanted, HiddenStates& hidden) {
                return score(model, parts, [&](Forest& forest) {
                    forest.spans[1].mlp_bias = mlp_bias.data();
                    forest.skipped = skipped;
                    if (!layers.empty()) forest.hidden_request = hidden.request();
                    if (wanted.size() == static_cast<std::size_t>(forest.rows)) return;
                    forest.wanted = wanted.data();
                    forest.num_wanted = static_cast<int>(wanted.size());
                });
            };
            HiddenStates all(model, {25, 3, 11}, layers), some(model, {25, 3, 11}, layers);
            const auto expected = run(chain(26), all);
            const auto kept = contents(first, sizes, 33), others = contents(second, sizes, 33);
            for (const std::vector<int>& wanted : std::vector<std::vector<int>>{
                     {}, {25}, {0}, {12, 13}, {2, 3, 7, 12, 14, 20}, {13, 14, 25}, {7, 2, 20}, {1, 0}}) {
                const auto got = run(wanted, some);
                for (std::size_t n = 0; n < wanted.size(); ++n)
                    check(same(got.data() + n * sizes.vocabulary, expected.data() + wanted[n] * sizes.vocabulary,
                               sizes.vocabulary), "scores of some rows");
                check(some.out == all.out, "hidden states where some rows are scored");
                check(contents(first, sizes, 33) == kept && contents(second, sizes, 33) == others, "what every row leaves");
            }
        }
}

void test_what_is_refused(Model& model, const Sizes& sizes) {
    Store store = store_of(sizes);
    const auto score_with = [&](std::vector<int> rows, std::vector<int> layers, int gap) {
        HiddenStates hidden(model, std::move(rows), std::move(layers));
        score(model, {{&store, 5, {-1}, 0, {1}, gap}}, [&](Forest& f) { f.hidden_request = hidden.request(); });
    };
    score_with({0}, {sizes.layers}, 5);
    check_throws([&] { score_with({1}, {0}, 0); }, "a row of hidden states beyond the rows");
    check_throws([&] { score_with({-1}, {0}, 0); }, "a row of hidden states below 0");
    check_throws([&] { score_with({0}, {sizes.layers + 1}, 0); }, "a layer beyond the last");
    check_throws([&] { score_with({0}, {-1}, 0); }, "a layer below 0");
    check_throws([&] { score_with({0}, {0}, 6); }, "a gap before the text");
    check_throws([&] { score_with({0}, {0}, -1); }, "a gap behind the text");
}

}  // namespace

uint64_t test_extras(const Sizes& sizes) {
    const auto model = make_model(sizes, find_kernels(""), 2);
    test_hidden_request(*model, sizes);
    test_gap(*model, sizes);
    test_skipping(*model, sizes);
    test_inputs_and_mlp_bias(*model, sizes);
    test_some_rows(*model, sizes);
    test_what_is_refused(*model, sizes);
    Floats expected;
    for (const Kernels* kernels : available_kernels())
        for (int threads = 1; threads <= 3; ++threads) {
            const Floats got = everything(*make_model(sizes, kernels, threads), sizes);
            if (expected.empty()) expected = got;
            check(got.size() == expected.size() && same(got.data(), expected.data(), got.size()), kernels->name);
        }
    return fingerprint(expected);
}

}  // namespace outpace
