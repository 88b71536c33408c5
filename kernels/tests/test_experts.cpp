// Mixtures of experts: every instruction set and any number of threads give the same bits, a row those that it has alone,
// whatever else a pass holds and however few experts stay packed; weights, choices and refusals are those of the formula.
#include <algorithm>
#include <cmath>
#include <string>
#include <thread>

#include "forests.h"

namespace outpace {
namespace {

/// What the layers of a small model have in place of an MLP.
struct Mixture {
    int experts, used, width;
    Format format = Format::f32;
    bool is_sigmoid = false, norms = false, is_corrected = false, is_biased = false;
    int shared = 0;  // width of the shared expert
    bool is_clamped = false, has_sinks = false, is_joint = false;
    int held = 0;  // 0: all
    bool is_damaged = false;
};

struct Bytes {
    std::vector<uint8_t> data;
    int64_t row_bytes;
};

/// Random rows of a file, floats or blocks with scales from 1/64 to 1/4.
Bytes file_rows(Random& random, Format format, int rows, int inputs) {
    const FileBlock block = file_block(format);
    Bytes found{{}, static_cast<int64_t>(inputs) / block.inputs * block.bytes};
    found.data.resize(rows * found.row_bytes);
    if (format == Format::f32) {
        const std::vector<float> weights = numbers(random, static_cast<std::size_t>(rows) * inputs, 0, 0.2f);
        std::memcpy(found.data.data(), weights.data(), found.data.size());
        return found;
    }
    for (uint8_t& byte : found.data) byte = static_cast<uint8_t>(random() >> 8);
    for (std::size_t start = 0; start < found.data.size(); start += block.bytes) {
        if (format == Format::mxfp4) found.data[start] = static_cast<uint8_t>(121 + found.data[start] % 3);
        if (format == Format::q4_1) found.data[start + 1] = 0x20, found.data[start + 3] = 0xa0;
        if (format == Format::q6_k) found.data[start + 208] = 0, found.data[start + 209] = 4;
    }
    return found;
}

/// An arena, and the models' layers with the experts that it holds.
struct ExpertModel {
    std::vector<std::shared_ptr<Experts>> experts;
    std::unique_ptr<Model> model, other;  // two with the same weights
};

std::shared_ptr<Experts> make_experts(Random& random, const Sizes& sizes, const Mixture& mixture,
                                      const std::shared_ptr<WeightArena>& arena) {
    const int width = round_up(mixture.width, kGroup), rows = mixture.experts + (mixture.shared > 0);
    Router router{mixture.experts, mixture.used, sizes.hidden, mixture.is_sigmoid, mixture.norms, 1e-6f, 1.5f,
                  mixture.shared > 0};
    router.set_weights(numbers(random, static_cast<std::size_t>(rows) * sizes.hidden, 0, 0.3f).data());
    if (mixture.is_biased) router.bias = numbers(random, mixture.experts, 0, 0.1f);
    if (mixture.is_corrected) router.correction = numbers(random, mixture.experts, 0, 0.1f);
    Experts::Source source{{}, {}, false, false, {}, {}, nullptr};
    for (int i = 0; i < 2 * width; ++i) {
        const int row = i / (2 * kLanes) * kLanes + i % kLanes;
        source.gate_up_rows.push_back(row >= mixture.width ? -1 : row + i / kLanes % 2 * mixture.width);
    }
    for (int i = 0; i < sizes.hidden; ++i) source.down_rows.push_back(i);
    auto owned = std::make_shared<std::vector<Bytes>>();
    owned->reserve(3 * mixture.experts);
    const auto add = [&](std::vector<Stored>& to, int outputs, int inputs, int padded, int parts) {
        Stored& one = to.emplace_back(Stored{{}, nullptr, 0, padded, padded == inputs ? 0 : inputs});
        for (int part = 0; part < parts; ++part) {
            const Bytes& bytes = owned->emplace_back(file_rows(random, mixture.format, outputs, inputs));
            one.parts.push_back({mixture.format, bytes.data.data(), outputs, bytes.row_bytes});
        }
    };
    for (int expert = 0; expert < mixture.experts; ++expert) {
        add(source.gate_up, mixture.width, sizes.hidden, sizes.hidden, 2);
        add(source.down, sizes.hidden, mixture.width, width, 1);
    }
    if (mixture.is_damaged)
        for (Bytes& bytes : *owned) bytes.data[bytes.data.size() / 17 / 2 * 17] = 255;
    source.owner = owned;
    std::vector<float> biases[2];
    if (mixture.is_biased) {
        biases[0] = numbers(random, static_cast<std::size_t>(mixture.experts) * 2 * width, 0, 0.1f);
        biases[1] = numbers(random, static_cast<std::size_t>(mixture.experts) * sizes.hidden, 0, 0.1f);
    }
    auto found = std::make_shared<Experts>(std::move(router), std::move(source), biases[0], biases[1], arena);
    if (mixture.held) found->hold(mixture.held);
    return found;
}

ExpertModel make_model(const Sizes& sizes, const Mixture& mixture, const Kernels* kernels, int threads) {
    Random random(17);
    const auto arena = std::make_shared<WeightArena>();
    const Heads heads = heads_of(sizes);
    const int middle = round_up(sizes.middle, kGroup);
    ExpertModel found;
    std::vector<std::shared_ptr<const Layer>> layers;
    for (int number = 0; number < sizes.layers; ++number) {
        auto layer = std::make_shared<Layer>();
        layer->attention_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
        layer->mlp_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
        if (mixture.is_joint) {
            layer->query_norm = numbers(random, sizes.queries * sizes.depth, 1, 0.1f);
            layer->key_norm = numbers(random, sizes.keys * sizes.depth, 1, 0.1f);
        }
        if (mixture.has_sinks) layer->sinks = numbers(random, sizes.queries, 0, 1.0f);
        if (sizes.is_gemma) layer->mlp_output_norm = padded(numbers(random, sizes.hidden, 1, 0.1f));
        layer->qkv = matrix(random, sizes, heads.outputs(), sizes.hidden, *arena);
        layer->output = matrix(random, sizes, sizes.hidden, heads.queries * heads.head_groups() * kGroup, *arena);
        if (number == 1) {  // a dense layer among those with experts
            layer->gate_up = matrix(random, sizes, 2 * middle, sizes.hidden, *arena);
            layer->down = matrix(random, sizes, sizes.hidden, middle, *arena);
        } else {
            layer->experts = make_experts(random, sizes, mixture, arena);
            found.experts.push_back(layer->experts);
        }
        if (number != 1 && mixture.shared) {
            layer->gate_up = matrix(random, sizes, 2 * mixture.shared, sizes.hidden, *arena);
            layer->down = matrix(random, sizes, sizes.hidden, mixture.shared, *arena);
        }
        layers.push_back(layer);
    }
    Shape shape{sizes.hidden, middle, 1e-5f, heads};
    if (mixture.is_clamped) shape.gating = Gating::clamped, shape.gate_limit = 0.7f;
    const auto embedding = matrix(random, sizes, sizes.vocabulary, sizes.hidden, *arena);
    const std::vector<float> norm = numbers(random, sizes.hidden, 1, 0.1f);
    for (auto* model : {&found.model, &found.other})
        *model = std::make_unique<Model>(shape, layers, embedding, norm, embedding, kernels, threads);
    return found;
}

constexpr Mixture kMixtures[] = {
    {8, 3, 70},
    {17, 4, 128, Format::q4_1, false, true},
    {6, 2, 256, Format::q6_k, true, true, true},
    {12, 2, 96, Format::mxfp4, false, true, false, true, 0, true, true},
    {9, 2, 64, Format::q4_1, true, false, true, false, 128, false, false, true},
};

Sizes sizes_of(const Mixture& mixture) {
    const int hidden = mixture.format == Format::q6_k ? 256 : mixture.format == Format::f32 ? 100 : 96;
    return {97, hidden, 80, 3, 4, 2, 16, KvFormat::float32, false, mixture.norms};
}

uint64_t test_bits(const Mixture& mixture) {
    const Sizes sizes = sizes_of(mixture);
    std::vector<float> expected;
    for (const Kernels* kernels : available_kernels())
        for (int threads = 1; threads <= 3; ++threads)
            for (int held : {mixture.experts, 1, mixture.used + 1}) {
                if (held < mixture.experts && threads == 3) continue;
                Mixture holding = mixture;
                holding.held = held;
                const ExpertModel made = make_model(sizes, holding, kernels, threads);
                Store store = store_of(sizes);
                std::vector<float> got = score(*made.model, {{&store, 0, chain(37), 0, text(37, sizes.vocabulary, 1)}});
                const auto tree = score(*made.model, {{&store, 37, kTree, 0, text(13, sizes.vocabulary, 2)}});
                got.insert(got.end(), tree.begin(), tree.end());
                if (expected.empty()) expected = got;
                check(same(got.data(), expected.data(), got.size()), (std::string("experts by ") + kernels->name).c_str());
                for (const auto& experts : made.experts) check(experts->num_packed() <= held, "no more experts stay packed");
            }
    return fingerprint(expected);
}

/// A row alone has the bits that it has among others.
void test_rows(const Mixture& mixture) {
    const Sizes sizes = sizes_of(mixture);
    const ExpertModel made = make_model(sizes, mixture, find_kernels(""), 2);
    const auto prompt = text(20, sizes.vocabulary, 3), nodes = text(13, sizes.vocabulary, 4);
    Store store = store_of(sizes), other = store_of(sizes);
    score(*made.model, {{&store, 0, chain(20), 0, prompt}});
    other.copy(store, 20);
    const auto tree = score(*made.model, {{&other, 20, kTree, 0, nodes}, {&store, 20, {-1}, 0, {1}}});
    for (int node = 0; node < 13; ++node) {
        std::vector<int> path;
        for (int at = node; at >= 0; at = kTree[at]) path.insert(path.begin(), nodes[at]);
        Store again = store_of(sizes);
        again.copy(store, 20);
        std::vector<float> alone;
        for (std::size_t i = 0; i < path.size(); ++i)
            alone = score(*made.model, {{&again, 20 + static_cast<int>(i), {-1}, 0, {path[i]}}});
        check(same(alone.data(), tree.data() + static_cast<std::size_t>(node) * sizes.vocabulary, alone.size()),
              "a row's experts do not depend on other rows");
    }
}

/// Models with the same weights may run at once, although each may drop experts that the other needs.
void test_two_models() {
    Mixture mixture = kMixtures[1];
    const Sizes sizes = sizes_of(mixture);
    const auto tokens = text(9, sizes.vocabulary, 5);
    const auto expected = fresh(*make_model(sizes, mixture, find_kernels(""), 2).model, sizes, tokens);
    mixture.held = mixture.used;
    const ExpertModel made = make_model(sizes, mixture, find_kernels(""), 2);
    const auto work = [&](Model& model) {
        for (int turn = 0; turn < 10; ++turn)
            check(same(fresh(model, sizes, tokens).data(), expected.data(), expected.size()), "models with shared experts");
    };
    std::thread beside([&] { work(*made.other); });
    work(*made.model);
    beside.join();
}

/// Experts are packed when they are chosen and counted.
void test_packing() {
    const Mixture mixture{64, 2, 64, Format::q4_1};
    const Sizes sizes = sizes_of(mixture);
    const ExpertModel made = make_model(sizes, mixture, find_kernels(""), 2);
    for (const auto& experts : made.experts) check(experts->num_packed() == 0, "nothing is packed before the first pass");
    Store store = store_of(sizes);
    score(*made.model, {{&store, 0, {-1}, 0, {1}}});
    check(made.model->mean_experts() == 2.0f, "a row reads the experts that it chooses");
    score(*made.model, {{&store, 0, {-1}, 0, {1}}});
    for (const auto& experts : made.experts) check(experts->num_packed() == 2, "only chosen experts are packed");
    score(*made.model, {{&store, 0, chain(9), 0, text(9, sizes.vocabulary, 5)}});
    const float mean = made.model->mean_experts();
    check(mean > 2.0f && mean <= 18.0f, "rows together read the experts of all");
    int total = 0;
    for (const auto& experts : made.experts) total += experts->num_packed();
    check(total >= 2 * mean && total < 2 * 64, "experts that no row chose are not packed");
    for (const auto& experts : made.experts) experts->pack_all();
    for (const auto& experts : made.experts) check(experts->num_packed() == 64, "all can be packed at once");
}

/// Choices and weights against the formula in double, with ties.
void test_choice() {
    Random random(23);
    const int experts = 37, inputs = 50, used = 5, equal[] = {20, 24, 28, 31, 32, 33, 36};  // to 3: some are chosen
    for (int kind = 0; kind < 6; ++kind) {
        Router router{experts, used, inputs, kind % 2 == 1, kind >= 2, 1e-6f, 2.5f, kind == 5};
        std::vector<float> matrix = numbers(random, static_cast<std::size_t>(router.rows()) * inputs, 0, 0.3f);
        for (const int one : equal) std::copy_n(matrix.begin() + 3 * inputs, inputs, matrix.begin() + one * inputs);
        router.set_weights(matrix.data());
        std::vector<float> bias(experts), correction(experts);
        if (kind == 4) {
            bias = numbers(random, experts, 0, 0.5f);
            for (const int one : equal) bias[one] = bias[3];
            router.bias = bias;
            router.bias.resize(router.stride());
        }
        if (kind == 3) router.correction = correction = std::vector<float>(experts, 0.25f);
        const int rows = 7;
        const std::vector<float> x = numbers(random, static_cast<std::size_t>(rows) * inputs, 0, 1.0f);
        for (const Kernels* kernels : available_kernels()) {
            std::vector<float> scores(static_cast<std::size_t>(rows) * router.stride()), weights(rows * router.shares());
            std::vector<int> chosen(rows * used);
            const ScoreExperts scoring{router, x.data(), inputs, rows, scores.data()};
            for (int vector = 0; vector < router.vectors(); ++vector) kernels->score_experts(scoring, vector);
            const ChooseExperts choice{router, scores.data(), chosen.data(), weights.data()};
            for (int row = 0; row < rows; ++row) {
                kernels->choose_experts(choice, row);
                std::vector<double> by(router.rows(), 0);
                for (int e = 0; e < router.rows(); ++e) {
                    for (int i = 0; i < inputs; ++i) by[e] += static_cast<double>(matrix[e * inputs + i]) * x[row * inputs + i];
                    if (e < experts) by[e] += bias[e];
                }
                double total = 0, sum = 0;
                for (int e = 0; e < experts; ++e) total += std::exp(by[e]);
                for (int e = 0; e < router.rows(); ++e)
                    by[e] = router.is_sigmoid || e == experts ? 1 / (1 + std::exp(-by[e])) : std::exp(by[e]) / total;
                std::vector<int> order(experts);
                for (int e = 0; e < experts; ++e) order[e] = e;
                std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return by[a] > by[b] + 1e-7; });
                std::sort(order.begin(), order.begin() + used);
                const int* mine = chosen.data() + row * used;
                check(std::equal(mine, mine + used, order.begin()), "the best experts are chosen, of equal ones the first");
                for (int n = 0; n < used; ++n) sum += by[mine[n]];
                for (int n = 0; n < used; ++n) {
                    const double expected = 2.5 * by[mine[n]] / (router.norms ? sum + 1e-6 : 1);
                    check(std::fabs(weights[row * (used + 1) + n] - expected) < 1e-5, "an expert's weight");
                }
                const double shared = kind == 5 ? by[experts] : 1;
                check(std::fabs(weights[row * (used + 1) + used] - shared) < 1e-5, "the shared expert's weight");
            }
        }
    }
}

void test_refusals() {
    Random random(29);
    const Sizes sizes{97, 96, 80, 3, 4, 2, 16, KvFormat::float32, false};
    const auto arena = std::make_shared<WeightArena>();
    const auto make = [&](const Mixture& mixture) { make_experts(random, sizes, mixture, arena); };
    check_throws([&] { make({4, 5, 64, Format::q4_1}); }, "more experts than there are");
    check_throws([&] { make({4, 0, 64, Format::q4_1}); }, "no experts");
    check_throws([&] { make_experts(random, sizes, {4, 2, 64, Format::q4_1}, nullptr); }, "no arena");
    check_throws([&] { make_experts(random, sizes, {4, 2, 64, Format::q4_1}, arena)->hold(5); }, "more than there are stay");
    const Mixture mixture{4, 2, 64, Format::mxfp4};
    const ExpertModel made = make_model(sizes, mixture, find_kernels(""), 2);
    Store store = store_of(sizes);
    const std::vector<float> bias(sizes.layers * 128);
    check_throws([&] {
        score(*made.model, {{&store, 0, {-1}, 0, {1}}}, [&](Forest& forest) { forest.spans[0].mlp_bias = bias.data(); });
    }, "biases of a pass for experts");
}

/// An exponent of MXFP4 that is not finite is found when its expert is packed, and again the next time.
void test_damage() {
    Mixture mixture{4, 2, 64, Format::mxfp4};
    mixture.is_damaged = true;
    const Sizes sizes = sizes_of(mixture);
    const ExpertModel made = make_model(sizes, mixture, find_kernels(""), 2);
    Store store = store_of(sizes);
    for (int turn = 0; turn < 2; ++turn) {
        std::string said;
        try {
            score(*made.model, {{&store, 0, {-1}, 0, {1}}});
        } catch (const std::domain_error& error) {
            said = error.what();
        }
        check(said.find("layer 0: a scale is not finite") != std::string::npos, "an exponent that is not finite");
        for (const auto& experts : made.experts) check(experts->num_packed() == 0, "damaged experts do not stay");
    }
}

}  // namespace

uint64_t test_experts() {
    test_choice();
    test_packing();
    test_two_models();
    test_refusals();
    test_damage();
    uint64_t bits = 0;
    for (const Mixture& mixture : kMixtures) {
        bits ^= test_bits(mixture);
        test_rows(mixture);
    }
    return bits;
}

}  // namespace outpace
