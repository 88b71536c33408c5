// The forward without Python, for sanitizers: every instruction set and 1 to 3 threads must give the same bits, a tree
// those of its branches, kept slots those of a fresh text; wrong sizes must throw. The bits are kBits on every machine.
// Exits 1 at the first failure.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "forests.h"

namespace outpace {
namespace {

// Fingerprints of all logits below and of products with a file's weights; they change only with the arithmetic.
constexpr uint64_t kBits = 0xd50607931a342ad9, kStoredBits = 0x88a8353af8da46aa, kExtraBits = 0xcb6177d5d6e3f37a,
                   kByteBits = 0x700919f2b1346423, kOurBits = 0x32a00bec30d416ff, kGemmaBits = 0x9a889bd41c8a9cfc, kGemma4Bits = 0xa154e86ae6fd9f1a,
                   kRecurrentBits = 0x5c27dc56635814fb, kExpertBits = 0x8861e9d34a3fc2f2, kPowerBits = 0x4b4eb3bec246083a;

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

/// A tree that is scored in two pieces has the logits of the whole.
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

/// A store that grows and shrinks, by small pages and by large ones, holds the same as one of fixed size.
void test_growing(const Sizes& sizes) {
    const auto model = make_model(sizes, find_kernels(""), 2);
    const auto tokens = text(64, sizes.vocabulary, 6);
    const int capacity = 1 << 16;
    Store fixed = store_of(sizes), store(std::vector<Heads>(sizes.layers, heads_of(sizes)), capacity, 0);
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
    for (int slots : {96, capacity, 64, 200, 40}) {
        store.resize(slots);
        check(store.slots() >= slots && store.slots() < slots + 32, "a store has the slots that were requested");
        check(store.bytes() == Store::bytes_of(std::vector<Heads>(sizes.layers, heads_of(sizes)), slots), "a store takes what it says");
        const int count = std::min(slots, 64);
        check(contents(store, sizes, count) == contents(fixed, sizes, count), "a store of another size holds the same");
    }
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

/// A pass over weights whose activations are rounded by quarters is close to one over the same weights in int8.
void test_quarters() {
    Sizes sizes{97, 256, 256, 2, 4, 2, 64, KvFormat::float32, false, false, Format::q6_k, false};
    const auto got = fresh(*make_model(sizes, find_kernels(""), 2), sizes, text(20, sizes.vocabulary, 5));
    sizes.is_rounded = true;
    const auto expected = fresh(*make_model(sizes, find_kernels(""), 2), sizes, text(20, sizes.vocabulary, 5));
    double apart = 0, size = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        apart += (got[i] - expected[i]) * (got[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    check(apart < 0.1 * 0.1 * size, "weights of six bits and the same in int8");
}

/// Layer features that Llama lacks. Windows exclude the prompt of a tree, part of it, and ancestors.
uint64_t test_gemma() {
    uint64_t bits = 0;
    for (KvFormat kv_format : {KvFormat::float32, KvFormat::float16, KvFormat::int8}) {
        const Sizes sizes{97, 100, 80, 5, 6, 2, 22, kv_format, kv_format == KvFormat::float16, true};
        bits ^= test_sets_and_threads(sizes);
        test_trees_and_keeping(sizes);
    }
    const Sizes plain{97, 100, 80, 5, 6, 2, 22, KvFormat::float32, false, true};
    const auto model = make_model(plain, find_kernels(""), 2);
    auto tokens = text(60, plain.vocabulary, 8);
    const auto before = fresh(*model, plain, tokens);
    tokens[0] = tokens[0] ? 0 : 1;
    check(!same(fresh(*model, plain, tokens).data(), before.data(), before.size()), "layers without a window see all");
    return bits;
}

/// Two models at once, each with its own team, called from two threads; both threads call one of them.
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
    const Sizes all[] = {{97, 48, 80, 2, 6, 2, 8, KvFormat::float32, false},
                         {130, 100, 70, 2, 4, 4, 22, KvFormat::float16, true},
                         {33, 192, 128, 2, 9, 3, 80, KvFormat::float32, true},
                         {33, 192, 128, 2, 4, 2, 80, KvFormat::int8, false}};  // with a fingerprint of its own
    test_ranking();
    test_fetching();
    test_sources();
    test_quarters();
    const uint64_t stored = test_stored(), ours = test_stored_ours(), gemma = test_gemma();
    uint64_t bits = 0, more = 0, bytes = 0;
    for (const Sizes& sizes : all) {
        const bool is_bytes = sizes.kv_format == KvFormat::int8;
        (is_bytes ? bytes : bits) ^= test_sets_and_threads(sizes);
        test_trees_and_keeping(sizes);
        test_growing(sizes);
        test_what_does_not_fit(sizes);
        test_models_beside_each_other(sizes);
        (is_bytes ? bytes : more) ^= test_extras(sizes);
    }
    std::printf("a file's weights %016llx, four bits of GPTQ and AWQ %016llx, ", static_cast<unsigned long long>(stored),
                static_cast<unsigned long long>(ours));
    const uint64_t recurrent = test_recurrent(), gemma4 = test_gemma4();
    std::printf("recurrent %016llx, ", static_cast<unsigned long long>(recurrent));
    const uint64_t experts = test_experts(), powers = test_stored_powers();
    std::printf("experts %016llx, MXFP4 %016llx, ", static_cast<unsigned long long>(experts),
                static_cast<unsigned long long>(powers));
    std::printf("Gemma %016llx, ", static_cast<unsigned long long>(gemma));
    std::printf("two sizes of heads %016llx, ", static_cast<unsigned long long>(gemma4));
    std::printf("extras %016llx, int8 keys and values %016llx, ", static_cast<unsigned long long>(more),
                static_cast<unsigned long long>(bytes));
    std::printf("bits %016llx:", static_cast<unsigned long long>(bits));
    for (const Kernels* kernels : available_kernels()) std::printf(" %s", kernels->name);
    std::printf("\n");
    check(bits == kBits, "the bits that machines are to have in common");
    check(stored == kStoredBits, "the bits of a file's weights that machines are to have in common");
    check(ours == kOurBits, "the bits of GPTQ's and AWQ's weights that machines are to have in common");
    check(gemma == kGemmaBits, "the bits of windows, rotations, norms behind sublayers and GELU");
    check(gemma4 == kGemma4Bits, "the bits of two sizes of heads, shared keys, embeddings by layer and caps");
    check(recurrent == kRecurrentBits, "the bits of recurrent layers and gated attention");
    check(experts == kExpertBits, "the bits of experts");
    check(powers == kPowerBits, "the bits of MXFP4's weights");
    check(more == kExtraBits, "the bits of hidden states, skipped layers, vectors and MLP biases");
    check(bytes == kByteBits, "the bits of keys and values in int8");
}

}  // namespace
}  // namespace outpace

int main() { outpace::test_all(); }
