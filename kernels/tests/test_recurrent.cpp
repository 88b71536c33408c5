// Recurrent layers: nodes of trees, kept in any way, have the bits of one-by-one decoding.
#include <algorithm>
#include <map>

#include "forests.h"

namespace outpace {
namespace {

using Tokens = std::vector<int>;

struct Hybrid {
    Recurrence recurrence;
    Heads heads;
    std::vector<bool> is_recurrent;
    int hidden;
    Format format = Format::f32;  // of a recurrent layer's input matrix
    int vocabulary = 40;

    Store store() const {
        return Store(std::vector<Heads>(is_recurrent.size() - recurrence.layers, heads), 100, 100, recurrence);
    }
};

Heads gated_heads() { return {4, 2, 24, KvFormat::float32, 0.2f, 1e-5f, true}; }

Recurrence delta_net(int layers, int keys, int values, int key_depth, int value_depth, bool is_tiled) {
    return {layers, 4, 2 * keys * key_depth + values * value_depth, keys, values, key_depth, value_depth, is_tiled};
}

std::unique_ptr<Model> make_model(const Hybrid& hybrid, const Kernels* kernels, int threads) {
    Random random(5);
    WeightArena arena;
    const Recurrence& sizes = hybrid.recurrence;
    const Sizes plain{};
    const int hidden = hybrid.hidden, middle = 128;
    const auto make = [&](int outputs, int inputs) { return matrix(random, plain, outputs, inputs, arena); };
    std::vector<std::shared_ptr<const Layer>> layers;
    for (bool is_recurrent : hybrid.is_recurrent) {
        auto layer = std::make_shared<Layer>();
        layer->attention_norm = padded(numbers(random, hidden, 1, 0.1f));
        layer->mlp_norm = padded(numbers(random, hidden, 1, 0.1f));
        layer->gate_up = make(2 * middle, hidden);
        layer->down = make(hidden, middle);
        if (is_recurrent) {
            auto weights = std::make_shared<RecurrentWeights>();
            weights->filters = numbers(random, sizes.filter_length * sizes.channels, 0, 0.5f);
            if (sizes.is_delta_net()) {
                weights->rates = numbers(random, sizes.value_heads, -0.8f, 0.4f);
                weights->time_bias = numbers(random, sizes.value_heads, 0, 1);
                weights->norm = numbers(random, sizes.value_depth, 1, 0.1f);
                layer->strengths = make(2 * sizes.value_heads, hidden);
            }
            layer->recurrent = weights;
            Sizes stored{};
            stored.format = hybrid.format, stored.is_rounded = false;
            layer->qkv = matrix(random, stored, sizes.inputs_end(), hidden, arena);
            layer->output = make(hidden, sizes.output_groups() * kGroup);
        } else {
            layer->qkv = make(hybrid.heads.outputs(), hidden);
            layer->output = make(hidden, hybrid.heads.queries * hybrid.heads.head_groups() * kGroup);
        }
        layers.push_back(layer);
    }
    const auto embedding = make(hybrid.vocabulary, hidden);
    Shape shape{hidden, middle, 1e-5f, hybrid.heads};
    shape.recurrence = sizes;
    return std::make_unique<Model>(shape, layers, embedding, numbers(random, hidden, 1, 0.1f), embedding, kernels, threads);
}

/// A session: a store, its committed tokens, and its pending nodes.
struct Session {
    Store store;
    Tokens committed, parents, tokens;

    explicit Session(const Hybrid& hybrid) : store(hybrid.store()) {}

    Part part(const Tokens& new_parents, const Tokens& new_tokens) {
        const Part part{&store, static_cast<int>(committed.size()), concatenated(parents, new_parents),
                        static_cast<int>(parents.size()), new_tokens};
        parents = part.parents;
        tokens = concatenated(tokens, new_tokens);
        return part;
    }

    Tokens text_of(int node) const {
        Tokens path;
        for (; node >= 0; node = parents[node]) path.insert(path.begin(), tokens[node]);
        return concatenated(committed, path);
    }

    void keep(const Tokens& path, const Tokens& live = {}) {
        Tokens slots, new_parents, new_tokens;
        for (int node : concatenated(path, live)) slots.push_back(static_cast<int>(committed.size()) + node);
        store.move(slots, static_cast<int>(committed.size()));
        store.states()->keep(path, live);
        for (int node : path) committed.push_back(tokens[node]);
        for (int node : live) {
            const auto parent = std::find(live.begin(), live.end(), parents[node]);
            new_parents.push_back(parent == live.end() ? -1 : static_cast<int>(parent - live.begin()));
            new_tokens.push_back(tokens[node]);
        }
        parents = new_parents;
        tokens = new_tokens;
    }

    static Tokens concatenated(Tokens first, const Tokens& second) {
        first.insert(first.end(), second.begin(), second.end());
        return first;
    }
};

/// Logits of texts, decoded one by one.
class Reference {
  public:
    Reference(const Hybrid& hybrid, Model& model) : hybrid_(hybrid), model_(model) {}

    const std::vector<float>& operator()(const Tokens& text) {
        auto& found = known_[text];
        if (!found.empty()) return found;
        Session session(hybrid_);
        for (int token : text) {
            found = score(model_, {session.part({-1}, {token})});
            session.keep({0});
        }
        return found;
    }

  private:
    const Hybrid& hybrid_;
    Model& model_;
    std::map<Tokens, std::vector<float>> known_;
};

/// Adds random nodes to sessions and keeps random branches; every row must have the reference's logits.
void check_random_trees(const Hybrid& hybrid, Model& model, Reference& reference, int seed) {
    Random random(seed);
    const auto below = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
    Session sessions[2]{Session(hybrid), Session(hybrid)};
    for (int round = 0; round < 8; ++round) {
        std::vector<Part> parts;
        std::vector<std::pair<int, int>> rows;
        for (int i = 0; i < 2; ++i) {
            Session& session = sessions[i];
            Tokens parents, tokens;
            const int before = static_cast<int>(session.parents.size());
            for (int count = below(6) + (i == 0); count > 0; --count) {
                const int nodes = before + static_cast<int>(parents.size());
                rows.emplace_back(i, nodes);
                parents.push_back(below(3) ? nodes - 1 : below(nodes + 1) - 1);
                tokens.push_back(below(hybrid.vocabulary));
            }
            parts.push_back(session.part(parents, tokens));
        }
        const std::vector<float> scores = score(model, parts);
        for (std::size_t row = 0; row < rows.size(); ++row) {
            const Tokens text = sessions[rows[row].first].text_of(rows[row].second);
            check(same(scores.data() + row * hybrid.vocabulary, reference(text).data(), hybrid.vocabulary),
                  "a node of a random tree has the logits of one-by-one decoding");
        }
        for (Session& session : sessions) {
            if (below(3) == 0) continue;  // all stay pending
            Tokens path, live;
            int last = -1;
            for (int node = 0; node < static_cast<int>(session.parents.size()); ++node)
                if (session.parents[node] == last && below(4)) path.push_back(last = node);
            for (int node = 0; node < static_cast<int>(session.parents.size()); ++node) {
                const int parent = session.parents[node];
                const bool is_below = parent == last || std::count(live.begin(), live.end(), parent);
                if (is_below && !std::count(path.begin(), path.end(), node) && below(3)) live.push_back(node);
            }
            session.keep(path, live);
        }
    }
}

/// Sessions copied, trimmed, and with skipped layers.
void check_sessions(const Hybrid& hybrid, Model& model, Reference& reference) {
    Session session(hybrid), other(hybrid), unfolded(hybrid);
    for (Session* each : {&session, &unfolded}) {
        score(model, {each->part({-1, 0, 1, 2, 3, 4}, {1, 2, 3, 4, 5, 6})});
        each->keep({0, 1, 2, 3, 4, 5});
    }
    std::vector<float> saved(session.store.states()->size());
    check_throws([&] { session.store.states()->save(saved.data()); }, "a state that lacks nodes is not saved");
    score(model, {other.part({-1}, {8})});
    other.store.copy(session.store, 6);
    model.fold(session.store);
    session.store.states()->save(saved.data());
    other.store.states()->load(saved.data());
    other.parents.clear();
    other.tokens.clear();
    other.committed = session.committed;
    session.store.states()->free_memory(0);
    const int layers = static_cast<int>(hybrid.is_recurrent.size());
    std::vector<char> skipped(2 * layers, 1);
    for (Session* each : {&session, &other, &unfolded}) {
        score(model, {each->part({-1}, {9})}, [&](Forest& forest) {  // its layers are skipped, but the accepted are folded
            forest.skipped = reinterpret_cast<const bool*>(skipped.data());
        });
        each->keep({});
        const auto scores = score(model, {each->part({-1}, {7})});
        check(same(scores.data(), reference({1, 2, 3, 4, 5, 6, 7}).data(), hybrid.vocabulary),
              "a copied session, and one whose layers were skipped, goes on with the same logits");
        each->store.states()->free_memory(0);
    }
    check_throws([&] { session.store.states()->keep({1}, {}); }, "a node that is not pending cannot be kept");
    Session late(hybrid);
    Part gap = late.part({-1}, {3});
    gap.pending = 1, gap.parents = {-1, 0};
    check_throws([&] { score(model, {gap}); }, "the states know the pending nodes");
}

}  // namespace

uint64_t test_recurrent() {
    const std::vector<Hybrid> hybrids = {
        {delta_net(3, 2, 4, 32, 48, false), gated_heads(), {true, false, true, true}, 72},
        {delta_net(2, 2, 4, 16, 16, true), gated_heads(), {true, true, false}, 64},
        {delta_net(1, 3, 3, 48, 80, false), gated_heads(), {false, true, false}, 64},
        {delta_net(1, 1, 2, 16, 32, false), gated_heads(), {true, false}, 256, Format::q6_k},
        {{2, 3, 80}, gated_heads(), {true, false, true}, 80},
    };
    std::vector<float> all;
    for (const Hybrid& hybrid : hybrids) {
        std::vector<float> first;
        for (const Kernels* kernels : available_kernels()) {
            const auto model = make_model(hybrid, kernels, 2);
            Reference reference(hybrid, *model);
            const auto& logits = reference({1, 2, 3, 4, 5, 6, 7, 8, 9});
            if (first.empty()) first = logits;
            check(same(first.data(), logits.data(), first.size()), "all instruction sets give recurrent layers' bits");
            for (int seed = 0; seed < 4; ++seed) check_random_trees(hybrid, *model, reference, seed);
            check_sessions(hybrid, *model, reference);
        }
        all.insert(all.end(), first.begin(), first.end());
    }
    return fingerprint(all);
}

}  // namespace outpace
