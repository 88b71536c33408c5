// Small models with the same numbers on every machine, and forests for them.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

#include "check.h"
#include "file_blocks.h"
#include "model.h"

namespace outpace {

struct Sizes {
    int vocabulary, hidden, middle, layers, queries, keys, depth;
    KvFormat kv_format;
    bool is_biased;
    bool is_gemma = false;  // windows, two rotations, norms after the sublayers, GELU, and its own scales
    Format format = Format::f32;  // of the matrices, or Q6_K
    bool is_rounded = true;  // to int8
};

using Random = std::mt19937;

/// Random numbers that are the same on every machine, unlike those of the library's distributions.
inline std::vector<float> numbers(Random& random, std::size_t count, float center, float width) {
    std::vector<float> values(count);
    for (float& value : values) {
        const float part = static_cast<float>(random() >> 8) * 0x1p-24f;  // 0 to 1
        value = center + width * (part * 3.5f - 1.75f);
    }
    return values;
}

/// Random Q6_K weights: any bytes, and for each 256 a scale that keeps weights below a half.
inline std::shared_ptr<Matrix> six_bit_matrix(Random& random, const Sizes& sizes, int outputs, int inputs,
                                              WeightArena& arena) {
    const FileBlock block = file_block(Format::q6_k);
    const int64_t row_bytes = static_cast<int64_t>(inputs) / block.inputs * block.bytes;
    std::vector<uint8_t> bytes(outputs * row_bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
    for (std::size_t end = block.bytes; end <= bytes.size(); end += block.bytes) bytes[end - 1] = 4, bytes[end - 2] = 0;
    std::vector<int> rows(outputs);
    for (int i = 0; i < outputs; ++i) rows[i] = i;
    const Stored stored{{{Format::q6_k, bytes.data(), outputs, row_bytes}}, rows.data(), outputs, inputs, 0};
    if (!sizes.is_rounded) return std::make_shared<Matrix>(stored, nullptr, 1, &arena);
    return std::make_shared<Matrix>(Matrix(stored, nullptr), 1, &arena);
}

inline std::shared_ptr<Matrix> matrix(Random& random, const Sizes& sizes, int outputs, int inputs, WeightArena& arena) {
    if (sizes.format == Format::q6_k) return six_bit_matrix(random, sizes, outputs, inputs, arena);
    const std::vector<float> weights = numbers(random, static_cast<std::size_t>(outputs) * inputs, 0, 0.1f);
    const std::vector<float> bias = numbers(random, outputs, 0, 0.1f);
    return std::make_shared<Matrix>(weights.data(), sizes.is_biased ? bias.data() : nullptr, outputs, inputs, 1,
                                    &arena);
}

inline Heads heads_of(const Sizes& sizes) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(sizes.depth));
    return {sizes.queries, sizes.keys, sizes.depth, sizes.kv_format, scale, 1e-5f};
}

inline std::vector<float> padded(std::vector<float> values) {
    values.resize(round_up(static_cast<int>(values.size()), kGroup), 0.0f);
    return values;
}

inline std::unique_ptr<Model> make_model(const Sizes& sizes, const Kernels* kernels, int threads) {
    Random random(7);
    WeightArena arena;
    const Heads heads = heads_of(sizes);
    const int middle = round_up(sizes.middle, kGroup);
    std::vector<std::shared_ptr<const Layer>> layers;
    for (int number = 0; number < sizes.layers; ++number) {
        auto layer = std::make_shared<Layer>();
        layer->attention_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
        layer->mlp_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
        if (sizes.is_biased) {
            layer->query_norm = numbers(random, sizes.depth, 1, 0.1f);
            layer->key_norm = numbers(random, sizes.depth, 1, 0.1f);
        }
        if (sizes.is_gemma) {
            layer->attention_output_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
            layer->mlp_output_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
            layer->rotation = 1 - number % 2;
            layer->window = number % 3 ? 0 : 9 + 14 * number;
        }
        layer->qkv = matrix(random, sizes, heads.outputs(), sizes.hidden, arena);
        layer->output = matrix(random, sizes, sizes.hidden, heads.queries * heads.head_groups() * kGroup, arena);
        layer->gate_up = matrix(random, sizes, 2 * middle, sizes.hidden, arena);
        layer->down = matrix(random, sizes, sizes.hidden, middle, arena);
        layers.push_back(layer);
    }
    const auto embedding = matrix(random, sizes, sizes.vocabulary, sizes.hidden, arena);
    Shape shape{sizes.hidden, middle, 1e-5f, heads};
    if (sizes.is_gemma) {
        shape.rotations = 2;
        shape.embedding_scale = 5.0f;
        shape.gating = Gating::gelu;
    }
    return std::make_unique<Model>(shape, layers, embedding, numbers(random, sizes.hidden, 1, 0.1f), embedding, kernels,
                                   threads);
}

/// A text or a tree after `pending` nodes; parents are pending nodes, -1 is the committed text.
struct Part {
    Store* store;
    int committed;
    std::vector<int> parents;  // of the pending nodes too
    int pending;
    std::vector<int> tokens;
    int position_gap = 0;
};

/// Returns the logits of all nodes of all parts. `change` may modify the forest first.
template <class Change>
inline std::vector<float> score(Model& model, const std::vector<Part>& parts, Change change) {
    Forest forest{};
    std::vector<std::unique_ptr<bool[]>> sees;
    std::vector<int> tokens, wanted;
    std::vector<float> rope_rows;
    std::vector<int> depths(model.shape().rotations, model.shape().heads.depth);  // of the heads that each turns
    for (int layer = 0; layer < model.num_layers(); ++layer)
        if (model.rotation(layer) >= 0) depths[model.rotation(layer)] = model.heads(layer).depth;
    for (const Part& part : parts) {
        const int count = static_cast<int>(part.tokens.size()), columns = part.pending + count;
        sees.emplace_back(new bool[static_cast<std::size_t>(count) * columns]());
        for (int node = 0; node < count; ++node) {
            int position = part.committed - part.position_gap - 1;
            for (int other = part.pending + node; other >= 0; other = part.parents[other], ++position)
                sees.back()[static_cast<std::size_t>(node) * columns + other] = true;
            wanted.push_back(static_cast<int>(tokens.size()));
            tokens.push_back(part.tokens[node]);
            for (int rotation = 0; rotation < model.shape().rotations; ++rotation)
                for (int i = rotation; i < rotation + depths[rotation] / 2; ++i) {
                    // tangent of half its angle
                    const float half = static_cast<float>(position) / static_cast<float>(i + 1);
                    rope_rows.push_back((1 - half * half) / (1 + half * half));
                    rope_rows.push_back(2 * half / (1 + half * half));
                }
        }
        forest.spans.push_back({part.store, part.committed, part.pending, count, sees.back().get(), part.position_gap});
    }
    forest.tokens = tokens.data();
    forest.rope_rows = rope_rows.data();
    forest.rows = static_cast<int>(tokens.size());
    forest.wanted = wanted.data();
    forest.num_wanted = forest.rows;
    std::vector<float> scores(static_cast<std::size_t>(forest.rows) * model.outputs());
    change(forest);
    model.forward(forest, scores.data());
    return scores;
}

inline std::vector<float> score(Model& model, const std::vector<Part>& parts) {
    return score(model, parts, [](Forest&) {});
}

inline std::vector<int> chain(int count) {
    std::vector<int> parents(count);
    for (int node = 0; node < count; ++node) parents[node] = node - 1;
    return parents;
}

inline std::vector<int> text(int count, int vocabulary, int seed) {
    Random random(seed);
    std::vector<int> tokens(count);
    for (int& token : tokens) token = static_cast<int>(random() % vocabulary);
    return tokens;
}

inline bool same(const float* a, const float* b, std::size_t count) { return !std::memcmp(a, b, count * sizeof(float)); }

inline Store store_of(const Sizes& sizes) { return Store(std::vector<Heads>(sizes.layers, heads_of(sizes)), 100, 100); }

/// Returns the last row's logits of a text that is fed at once.
inline std::vector<float> fresh(Model& model, const Sizes& sizes, const std::vector<int>& tokens) {
    Store store = store_of(sizes);
    const auto scores = score(model, {{&store, 0, chain(static_cast<int>(tokens.size())), 0, tokens}});
    return {scores.end() - sizes.vocabulary, scores.end()};
}

inline const std::vector<int> kTree = {-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 0, 10, 11};

/// FNV-1a over the bytes of numbers: a fingerprint of bits that all machines must share.
inline uint64_t fingerprint(const std::vector<float>& values) {
    uint64_t hash = 0xcbf29ce484222325u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (std::size_t i = 0; i < values.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

inline std::vector<float> contents(const Store& store, const Sizes& sizes, int count) {
    const std::size_t size = static_cast<std::size_t>(2) * sizes.keys * count * sizes.depth;
    std::vector<float> out(size * sizes.layers);
    for (int layer = 0; layer < sizes.layers; ++layer) store.read(layer, count, out.data() + layer * size);
    return out;
}

template <class F>
void check_throws(F f, const char* what) {
    try {
        f();
    } catch (const std::invalid_argument&) {
        return;
    }
    check(false, what);
}

}  // namespace outpace
