// The forward without Python, for sanitizers: every instruction set and 1 to 3 threads must give the same bits, a tree
// those of its branches, kept slots those of a fresh text; what does not fit must throw. The bits are those of kBits on
// every machine. Exits 1 at the first failure.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "model.h"

namespace outpace {
namespace {

struct Sizes {
    int vocabulary, hidden, middle, layers, queries, keys, depth;
    bool is_half, is_biased;
};

using Random = std::mt19937;

/// Numbers that are the same on every machine, as those of the library's distributions are not.
std::vector<float> numbers(Random& random, std::size_t count, float center, float width) {
    std::vector<float> values(count);
    for (float& value : values) {
        const float part = static_cast<float>(random() >> 8) * 0x1p-24f;  // 0 to 1
        value = center + width * (part * 3.5f - 1.75f);
    }
    return values;
}

std::shared_ptr<Matrix> matrix(Random& random, const Sizes& sizes, int outputs, int inputs) {
    const std::vector<float> weights = numbers(random, static_cast<std::size_t>(outputs) * inputs, 0, 0.1f);
    const std::vector<float> bias = numbers(random, outputs, 0, 0.1f);
    return std::make_shared<Matrix>(weights.data(), sizes.is_biased ? bias.data() : nullptr, outputs, inputs);
}

Heads heads_of(const Sizes& sizes) {
    return {sizes.queries, sizes.keys, sizes.depth, sizes.is_half, 1.0f / std::sqrt(static_cast<float>(sizes.depth)), 1e-5f};
}

std::vector<float> padded(std::vector<float> values) {
    values.resize(round_up(static_cast<int>(values.size()), kGroup), 0.0f);
    return values;
}

std::unique_ptr<Model> make_model(const Sizes& sizes, const Kernels* kernels, int threads) {
    Random random(7);
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
        layer->qkv = matrix(random, sizes, heads.outputs(), sizes.hidden);
        layer->output = matrix(random, sizes, sizes.hidden, heads.queries * heads.head_groups() * kGroup);
        layer->gate_up = matrix(random, sizes, 2 * middle, sizes.hidden);
        layer->down = matrix(random, sizes, sizes.hidden, middle);
        gather({&layer->qkv, &layer->output, &layer->gate_up, &layer->down});
        layers.push_back(layer);
    }
    const auto embedding = matrix(random, sizes, sizes.vocabulary, sizes.hidden);
    return std::make_unique<Model>(Shape{sizes.hidden, middle, 1e-5f, heads}, layers, embedding,
                                   numbers(random, sizes.hidden, 1, 0.1f), embedding, kernels, threads);
}

/// A text or a tree behind `pending` nodes; parents count from the first pending node, -1 is the committed text.
struct Part {
    Store* store;
    int committed;
    std::vector<int> parents;  // of the pending nodes too
    int pending;
    std::vector<int> tokens;
};

/// Scores of all nodes of all parts.
std::vector<float> score(Model& model, const std::vector<Part>& parts) {
    Forest forest{};
    std::vector<std::unique_ptr<bool[]>> sees;
    std::vector<int> tokens, wanted;
    std::vector<float> turns;
    const int depth = model.shape().heads.depth;
    for (const Part& part : parts) {
        const int count = static_cast<int>(part.tokens.size()), columns = part.pending + count;
        sees.emplace_back(new bool[static_cast<std::size_t>(count) * columns]());
        for (int node = 0; node < count; ++node) {
            int position = part.committed - 1;
            for (int other = part.pending + node; other >= 0; other = part.parents[other], ++position)
                sees.back()[static_cast<std::size_t>(node) * columns + other] = true;
            wanted.push_back(static_cast<int>(tokens.size()));
            tokens.push_back(part.tokens[node]);
            for (int i = 0; i < depth / 2; ++i) {
                const float half = static_cast<float>(position) / static_cast<float>(i + 1);  // its angle's tangent
                turns.push_back((1 - half * half) / (1 + half * half));
                turns.push_back(2 * half / (1 + half * half));
            }
        }
        forest.spans.push_back({part.store, part.committed, part.pending, count, sees.back().get()});
    }
    forest.tokens = tokens.data();
    forest.turns = turns.data();
    forest.rows = static_cast<int>(tokens.size());
    forest.wanted = wanted.data();
    forest.num_wanted = forest.rows;
    std::vector<float> scores(static_cast<std::size_t>(forest.rows) * model.outputs());
    model.forward(forest, scores.data());
    return scores;
}

std::vector<int> chain(int count) {
    std::vector<int> parents(count);
    for (int node = 0; node < count; ++node) parents[node] = node - 1;
    return parents;
}

std::vector<int> text(int count, int vocabulary, int seed) {
    Random random(seed);
    std::vector<int> tokens(count);
    for (int& token : tokens) token = static_cast<int>(random() % vocabulary);
    return tokens;
}

bool same(const float* a, const float* b, std::size_t count) { return !std::memcmp(a, b, count * sizeof(float)); }

Store store_of(const Sizes& sizes) { return Store(heads_of(sizes), sizes.layers, 100, 100); }

/// The last row's scores of a text that is fed at once.
std::vector<float> fresh(Model& model, const Sizes& sizes, const std::vector<int>& tokens) {
    Store store = store_of(sizes);
    const auto scores = score(model, {{&store, 0, chain(static_cast<int>(tokens.size())), 0, tokens}});
    return {scores.end() - sizes.vocabulary, scores.end()};
}

const std::vector<int> kTree = {-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 0, 10, 11};

// Of all that is scored below, and of products with a file's weights; changed by a change of the arithmetic alone.
constexpr uint64_t kBits = 0x9ca4bbbd1fd7a555, kStoredBits = 0x6b5f2b69fc19338d;

/// FNV-1a over the bytes of numbers: one short name for the bits that machines are to have in common.
uint64_t fingerprint(const std::vector<float>& values) {
    uint64_t hash = 0xcbf29ce484222325u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (std::size_t i = 0; i < values.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

uint64_t test_sets_and_threads(const Sizes& sizes) {
    std::vector<float> expected;
    for (const Kernels* kernels : available_kernels())
        for (int threads = 1; threads <= 3; ++threads) {
            const auto model = make_model(sizes, kernels, threads);
            Store store = store_of(sizes);
            std::vector<float> got = score(*model, {{&store, 0, chain(37), 0, text(37, sizes.vocabulary, 1)}});
            const auto tree = score(*model, {{&store, 37, kTree, 0, text(13, sizes.vocabulary, 2)}});
            got.insert(got.end(), tree.begin(), tree.end());
            if (expected.empty()) expected = got;
            check(got.size() == expected.size() && same(got.data(), expected.data(), got.size()), kernels->name);
        }
    return fingerprint(expected);
}

/// A tree that is scored in two pieces has the scores of the whole.
void check_pieces(Model& model, const Sizes& sizes, const std::vector<int>& prompt, const std::vector<int>& nodes,
                  const std::vector<float>& whole) {
    Store store = store_of(sizes);
    score(model, {{&store, 0, chain(20), 0, prompt}});
    score(model, {{&store, 20, {kTree.begin(), kTree.begin() + 6}, 0, {nodes.begin(), nodes.begin() + 6}}});
    const auto rest = score(model, {{&store, 20, kTree, 6, {nodes.begin() + 6, nodes.end()}}});
    check(same(rest.data(), whole.data() + 6 * static_cast<std::size_t>(sizes.vocabulary), rest.size()),
          "a tree in two pieces scores as the whole");
}

void test_trees_and_keeping(const Sizes& sizes) {
    const auto model = make_model(sizes, find_kernels(""), 2);
    const auto prompt = text(20, sizes.vocabulary, 3), nodes = text(13, sizes.vocabulary, 4);
    Store store = store_of(sizes), other = store_of(sizes);
    score(*model, {{&store, 0, chain(20), 0, prompt}});
    other.copy(store, 20);
    const auto tree = score(*model, {{&other, 20, kTree, 0, nodes}, {&store, 20, {-1}, 0, {1}}});
    for (int node = 0; node < 13; ++node) {
        std::vector<int> path;
        for (int at = node; at >= 0; at = kTree[at]) path.insert(path.begin(), nodes[at]);
        path.insert(path.begin(), prompt.begin(), prompt.end());
        const auto alone = fresh(*model, sizes, path);
        check(same(alone.data(), tree.data() + static_cast<std::size_t>(node) * sizes.vocabulary, alone.size()),
              "a tree scores as its paths");
    }
    auto beside = prompt;
    beside.push_back(1);
    check(same(fresh(*model, sizes, beside).data(), tree.data() + 13 * static_cast<std::size_t>(sizes.vocabulary),
               sizes.vocabulary), "a session beside another scores as alone");
    check_pieces(*model, sizes, prompt, nodes, tree);
    other.move({20, 30, 31, 32}, 20);
    const auto next = score(*model, {{&other, 24, {-1}, 0, {5}}});
    auto whole = prompt;
    for (int node : {0, 10, 11, 12}) whole.push_back(nodes[node]);
    whole.push_back(5);
    check(same(next.data(), fresh(*model, sizes, whole).data(), next.size()), "kept slots equal a fresh text");
}

std::vector<float> held(const Store& store, const Sizes& sizes, int count) {
    const std::size_t size = static_cast<std::size_t>(2) * sizes.keys * count * sizes.depth;
    std::vector<float> out(size * sizes.layers);
    for (int layer = 0; layer < sizes.layers; ++layer) store.read(layer, count, out.data() + layer * size);
    return out;
}

/// A store that grows and shrinks, by small pages and by large ones, holds what one of fixed size does.
void test_growing(const Sizes& sizes) {
    const auto model = make_model(sizes, find_kernels(""), 2);
    const auto tokens = text(64, sizes.vocabulary, 6);
    const int most = 1 << 16;
    Store fixed = store_of(sizes), store(heads_of(sizes), sizes.layers, most, 0);
    check(store.slots() == 0 && store.bytes() == 0, "a store without slots takes nothing");
    const auto expected = score(*model, {{&fixed, 0, chain(64), 0, tokens}});
    int read = 0;
    std::vector<float> got;
    for (int slots : {7, 32, 33, 64}) {
        store.resize(slots);
        const auto here = score(*model, {{&store, read, chain(slots - read), 0, {tokens.begin() + read,
                                                                                  tokens.begin() + slots}}});
        got.insert(got.end(), here.begin(), here.end());
        read = slots;
    }
    check(same(got.data(), expected.data(), got.size()), "a growing store scores as a fixed one");
    for (int slots : {96, most, 64, 200, 40}) {
        store.resize(slots);
        check(store.slots() >= slots && store.slots() < slots + 32, "a store has the slots that it was asked for");
        check(store.bytes() == Store::bytes_of(heads_of(sizes), sizes.layers, slots), "a store takes what it says");
        const int count = std::min(slots, 64);
        check(held(store, sizes, count) == held(fixed, sizes, count), "a store of another size holds the same");
    }
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

void test_what_does_not_fit(const Sizes& sizes) {
    const auto model = make_model(sizes, find_kernels("portable"), 1);
    Store store = store_of(sizes);
    check_throws([&] { score(*model, {{&store, 0, {-1}, 0, {sizes.vocabulary}}}); }, "a token beyond the vocabulary");
    check_throws([&] { score(*model, {{&store, 200, {-1}, 0, {1}}}); }, "a span beyond the store");
    Sizes fewer = sizes;
    fewer.layers -= 1;
    Store foreign = store_of(fewer);
    check_throws([&] { score(*model, {{&foreign, 0, {-1}, 0, {1}}}); }, "a store of another model");
}

/// Two models at once, each with its own team, called from two threads; one of them is called by both.
void test_models_beside_each_other(const Sizes& sizes) {
    const auto first = make_model(sizes, find_kernels(""), 2), second = make_model(sizes, find_kernels(""), 2);
    const auto tokens = text(9, sizes.vocabulary, 5);
    const auto expected = fresh(*first, sizes, tokens);
    const auto work = [&] {
        for (int turn = 0; turn < 20; ++turn)
            for (Model* model : {first.get(), second.get()})
                check(same(fresh(*model, sizes, tokens).data(), expected.data(), expected.size()), "models at once");
    };
    std::thread beside(work);
    work();
    beside.join();
}

void test_all() {
    const Sizes all[] = {{97, 48, 80, 2, 6, 2, 8, false, false},
                         {130, 100, 70, 2, 4, 4, 22, true, true},
                         {33, 192, 128, 2, 9, 3, 80, false, true}};
    test_ranking();
    check(test_stored() == kStoredBits, "the bits of a file's weights that machines are to have in common");
    uint64_t bits = 0;
    for (const Sizes& sizes : all) {
        bits ^= test_sets_and_threads(sizes);
        test_trees_and_keeping(sizes);
        test_growing(sizes);
        test_what_does_not_fit(sizes);
        test_models_beside_each_other(sizes);
    }
    std::printf("bits %016llx:", static_cast<unsigned long long>(bits));
    for (const Kernels* kernels : available_kernels()) std::printf(" %s", kernels->name);
    std::printf("\n");
    check(bits == kBits, "the bits that machines are to have in common");
}

}  // namespace
}  // namespace outpace

int main() { outpace::test_all(); }
