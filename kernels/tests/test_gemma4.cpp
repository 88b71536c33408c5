// A model with heads of two sizes, keys that later layers read, embeddings by layer, and caps.
#include "forests.h"

namespace outpace {
namespace {

constexpr int kHidden = 80, kMiddle = 128, kEmbedded = 12, kTokens = 97, kLayers = 5;
constexpr Sizes kSizes{kTokens, kHidden, kMiddle, kLayers, 4, 2, 22, KvFormat::float32, false, true};

Heads local_heads(int projected) { return {4, 2, 22, KvFormat::float32, 1.0f, 1e-5f, false, 2.0f, projected, true}; }
Heads full_heads(int projected) { return {4, 1, 36, KvFormat::float32, 1.0f, 1e-5f, false, 2.0f, projected, true}; }

struct Made {
    std::unique_ptr<Model> model;
    std::shared_ptr<std::vector<float>> table;

    Store store() const { return Store({local_heads(2), full_heads(1), local_heads(2)}, 100, 100); }
};

/// Layers: local, full, local, then a local and a full one that read the keys of the last of their kind.
Made make(const Kernels* kernels, int threads, bool has_embeddings) {
    Random random(11);
    WeightArena arena;
    std::vector<std::shared_ptr<const Layer>> layers;
    for (int number = 0; number < kLayers; ++number) {
        auto layer = std::make_shared<Layer>();
        const bool is_full = number % 3 == 1, shares = number > 2;
        layer->heads = is_full ? full_heads(shares ? 0 : 1) : local_heads(shares ? 0 : 2);
        layer->keys_of = shares ? number == 3 ? 2 : 1 : -1;
        layer->rotation = is_full ? 0 : 1, layer->window = is_full ? 0 : 6;
        layer->scale = 0.9f;
        for (auto* norm : {&layer->attention_norm, &layer->mlp_norm, &layer->attention_output_norm, &layer->mlp_output_norm})
            *norm = padded(numbers(random, kHidden, 1, 0.1f));
        layer->query_norm = numbers(random, layer->heads->depth, 1, 0.1f);
        if (!shares) layer->key_norm = numbers(random, layer->heads->depth, 1, 0.1f);
        const int middle = shares ? kMiddle : kMiddle / 2;
        const auto make = [&](int outputs, int inputs) { return matrix(random, kSizes, outputs, inputs, arena); };
        layer->qkv = make(layer->heads->outputs(), kHidden);
        layer->output = make(kHidden, 4 * kGroup);
        layer->gate_up = make(2 * middle, kHidden), layer->down = make(kHidden, middle);
        if (has_embeddings) {
            auto branch = std::make_shared<EmbeddingBranch>();
            branch->gate = make(kEmbedded, kHidden), branch->output = make(kHidden, kEmbedded);
            branch->norm = padded(numbers(random, kHidden, 1, 0.1f));
            layer->embedding = branch;
        }
        layers.push_back(layer);
    }
    auto embeddings = std::make_shared<TokenEmbeddings>();
    auto table = std::make_shared<std::vector<float>>(numbers(random, kTokens * kLayers * kEmbedded, 0, 0.3f));
    const auto* data = reinterpret_cast<const uint8_t*>(table->data());
    embeddings->table = {Format::f32, data, kTokens, kLayers * kEmbedded * 4};
    embeddings->projection = matrix(random, kSizes, kLayers * kEmbedded, kHidden, arena);
    embeddings->norm = numbers(random, kEmbedded, 1, 0.1f);
    Shape shape{kHidden, kMiddle, 1e-5f, local_heads(2)};
    shape.rotations = 2, shape.embedding_scale = 5.0f, shape.gating = Gating::gelu, shape.logit_cap = 3.0f;
    const auto embedding = matrix(random, kSizes, kTokens, kHidden, arena);
    return {std::make_unique<Model>(shape, layers, embedding, numbers(random, kHidden, 1, 0.1f), embedding, kernels, threads,
                                    has_embeddings ? embeddings : nullptr), table};
}

std::vector<float> scores_of(const Made& made) {
    Store store = made.store();
    auto found = score(*made.model, {{&store, 0, chain(20), 0, text(20, kTokens, 3)}});
    const std::vector<int> nodes = text(static_cast<int>(kTree.size()), kTokens, 4);
    const auto tree = score(*made.model, {{&store, 20, kTree, 0, nodes}});
    found.insert(found.end(), tree.begin(), tree.end());
    return found;
}

}  // namespace

uint64_t test_gemma4() {
    uint64_t bits = 0;
    for (bool has_embeddings : {false, true}) {
        const auto expected = scores_of(make(find_kernels("portable"), 1, has_embeddings));
        for (const Kernels* kernels : available_kernels())
            for (int threads : {1, 3}) {
                const auto got = scores_of(make(kernels, threads, has_embeddings));
                check(same(got.data(), expected.data(), expected.size()), "two sizes of heads on every machine");
            }
        bits ^= fingerprint(expected);
        const Made made = make(find_kernels(""), 1, has_embeddings);
        Store whole = made.store(), kept = made.store();
        const auto tokens = text(20, kTokens, 3);
        score(*made.model, {{&kept, 0, chain(20), 0, tokens}});
        Store other = made.store();
        other.copy(kept, 19);
        const auto last = score(*made.model, {{&other, 19, {-1}, 0, {tokens[19]}}});
        check(same(last.data(), expected.data() + 19 * kTokens, kTokens), "a copied store continues");
    }
    return bits;
}

}  // namespace outpace
