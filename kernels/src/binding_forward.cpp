// Python bindings of a pass: arrays to a forest, each with its shape checked.
#include <nanobind/stl/map.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "binding.h"

namespace outpace {
namespace {

using Numbers = Array<const int32_t, 1>;
using Grid = Array<const float, 2>;
using Grids = std::map<int, Grid>;  // from the index of a span
using SpanTuple = std::tuple<Store*, int, int, int, Array<const bool, 2>>;
using ShortSpan = std::tuple<Store*, int, int, int, nb::bytes>;
using Numbered = std::vector<int>;

/// Restricts a forest to some panels of the output layer, if any are given.
void set_panels(Forest& forest, const Numbers& panels) {
    if (!panels.is_valid()) return;
    forest.panels = panels.data();
    forest.num_panels = static_cast<int>(panels.shape(0));
}

void require_shape(bool holds, const char* name) {
    if (!holds) throw std::invalid_argument(std::string(name) + " has the wrong shape");
}

Span& span_at(Forest& forest, int number) {
    if (number < 0 || number >= static_cast<int>(forest.spans.size()))
        throw std::invalid_argument("a span is out of range");
    return forest.spans[number];
}

bool is_grid(const Grid& grid, int64_t rows, int64_t columns) {
    return static_cast<int64_t>(grid.shape(0)) == rows && static_cast<int64_t>(grid.shape(1)) == columns;
}

void add_spans(Forest& forest, const std::vector<SpanTuple>& spans) {
    for (const auto& [store, committed, pending, count, sees] : spans) {
        require_shape(static_cast<int>(sees.shape(0)) == count && static_cast<int>(sees.shape(1)) == pending + count,
                      "sees");
        forest.spans.push_back({store, committed, pending, count, sees.data()});
    }
}

/// Adds optional inputs to single spans: gaps, vectors and biases of the MLPs.
void add_to_spans(const Model& model, Forest& forest, const std::map<int, int>& position_gaps, const Grids& inputs,
                  const Grids& mlp_bias) {
    for (const auto& [number, gap] : position_gaps) span_at(forest, number).position_gap = gap;
    for (const auto& [number, grid] : inputs) {
        Span& span = span_at(forest, number);
        require_shape(is_grid(grid, span.tokens, model.shape().hidden), "inputs");
        span.inputs = grid.data();
    }
    for (const auto& [number, grid] : mlp_bias) {
        require_shape(is_grid(grid, model.num_layers(), model.shape().middle), "mlp_bias");
        span_at(forest, number).mlp_bias = grid.data();
    }
}

/// Computes logits of the wanted rows. Everything after them is optional: skipped sublayers, the rows whose hidden
/// states after each of `layers` are written to `hidden`, three maps from a span's index to its gap, to vectors in place
/// of its tokens, and to the biases of its MLPs, and the panels of the output layer to compute.
void forward(Model& model, const std::vector<SpanTuple>& spans, const Numbers& tokens,
             const Array<const float, 3>& rope_rows, const Numbers& wanted, const Array<float, 2>& scores,
             const Array<const bool, 2>& skipped, const Numbers& hidden_rows, const Numbers& layers,
             const Array<float, 3>& hidden, const std::map<int, int>& position_gaps, const Grids& inputs,
             const Grids& mlp_bias, const Numbers& panels) {
    Forest forest{};
    set_panels(forest, panels);
    add_spans(forest, spans);
    add_to_spans(model, forest, position_gaps, inputs, mlp_bias);
    require_shape(rope_rows.shape(0) == tokens.shape(0) &&
                      rope_rows.size() == tokens.shape(0) * model.rope_floats(),
                  "rope_rows");
    require_shape(scores.shape(0) == wanted.shape(0) && static_cast<int>(scores.shape(1)) == model.num_logits(forest),
                  "scores");
    forest.tokens = tokens.data();
    forest.rope_rows = rope_rows.data();
    forest.rows = static_cast<int>(tokens.shape(0));
    forest.wanted = wanted.data();
    forest.num_wanted = static_cast<int>(wanted.shape(0));
    if (skipped.is_valid()) {
        require_shape(static_cast<int>(skipped.shape(0)) == model.num_layers() && skipped.shape(1) == 2, "skipped");
        forest.skipped = skipped.data();
    }
    if (hidden_rows.is_valid() && layers.is_valid() && hidden.is_valid()) {
        require_shape(hidden.shape(0) == layers.shape(0) && hidden.shape(1) == hidden_rows.shape(0) &&
                          static_cast<int>(hidden.shape(2)) == model.shape().hidden,
                      "hidden");
        forest.hidden_request = {hidden_rows.data(), static_cast<int>(hidden_rows.shape(0)), layers.data(),
                       static_cast<int>(layers.shape(0)), hidden.data()};
    }
    const nb::gil_scoped_release release;
    model.forward(forest, scores.data());
}

/// Looks up the rotation of each row by its position in a table [positions, rotations * depth / 2, 2].
std::vector<float> rope_rows_at(const Numbered& positions, const Array<const float, 3>& table, std::size_t floats) {
    require_shape(table.shape(1) * table.shape(2) == floats, "rope_table");
    std::vector<float> rope_rows(positions.size() * floats);
    for (std::size_t row = 0; row < positions.size(); ++row) {
        if (positions[row] < 0 || positions[row] >= static_cast<int64_t>(table.shape(0)))
            throw std::invalid_argument("a position is out of range");
        std::copy_n(table.data() + positions[row] * floats, floats, rope_rows.data() + row * floats);
    }
    return rope_rows;
}

/// Does the same as `forward` for callers that need logits only: takes Python lists, and each span's `sees` as bytes.
/// Building numpy arrays would take longer than everything else before a small model's pass, because numpy's code is
/// not in the caches then. Returns the best `count` tokens of each wanted row, by log-probability if count > 1; none
/// for 0. `token_ids`: the tokens of the first `num_logits` logits of a row, or null for
/// 0, 1, ... `panels`: as of `forward`.
ProposalRows score(Model& model, const std::vector<ShortSpan>& spans, const Numbered& tokens,
                         const Numbered& positions, const Array<const float, 3>& table, const Numbered& wanted,
                         const Array<float, 2>& scores, int count, int num_logits, const Tokens& token_ids,
                         const Numbers& panels) {
    Forest forest{};
    set_panels(forest, panels);
    require_shape(num_logits >= 0 && num_logits <= model.num_logits(forest) &&
                      (!token_ids.is_valid() || static_cast<int>(token_ids.size()) == num_logits),
                  "token_ids");
    for (const auto& [store, committed, pending, count, sees] : spans) {
        require_shape(count >= 0 && pending >= 0 &&
                          sees.size() == static_cast<std::size_t>(count) * (static_cast<std::size_t>(pending) + count),
                      "sees");
        forest.spans.push_back({store, committed, pending, count, reinterpret_cast<const bool*>(sees.c_str())});
    }
    require_shape(positions.size() == tokens.size(), "positions");
    require_shape(scores.shape(0) == wanted.size() && static_cast<int>(scores.shape(1)) == model.num_logits(forest),
                  "scores");
    const std::vector<float> rope_rows = rope_rows_at(positions, table, model.rope_floats());
    forest.tokens = tokens.data();
    forest.rope_rows = rope_rows.data();
    forest.rows = static_cast<int>(tokens.size());
    forest.wanted = wanted.data();
    forest.num_wanted = static_cast<int>(wanted.size());
    const nb::gil_scoped_release release;
    std::vector<Proposals> best(count > 0 ? wanted.size() : 0);
    if (count > 0)
        forest.after = [&](int row) {
            best[row] = best_of(model.kernels(),
                                {scores.data() + row * scores.shape(1),
                                 token_ids.is_valid() ? token_ids.data() : nullptr, num_logits, 1.0, nullptr, count > 1},
                                count);
        };
    model.forward(forest, scores.data());
    return share(std::move(best));
}

void project(Model& model, const Grid& hidden, const Array<float, 2>& scores) {
    require_shape(is_grid(hidden, static_cast<int64_t>(hidden.shape(0)), model.shape().hidden), "hidden");
    require_shape(scores.shape(0) == hidden.shape(0) && static_cast<int>(scores.shape(1)) == model.outputs(), "scores");
    const nb::gil_scoped_release release;
    model.project(hidden.data(), static_cast<int>(hidden.shape(0)), scores.data());
}

}  // namespace

void bind_forward(nb::class_<Model>& model) {
    const auto none = nb::none();
    model
        .def("forward", &forward, "spans"_a, "tokens"_a, "rope_rows"_a, "wanted"_a, "scores"_a,
             "skipped"_a.none() = none, "hidden_rows"_a.none() = none, "layers"_a.none() = none,
             "hidden"_a.none() = none,
             "position_gaps"_a = std::map<int, int>{}, "inputs"_a = Grids{}, "mlp_bias"_a = Grids{},
             "panels"_a.none() = none)
        .def("score", &score, "spans"_a, "tokens"_a, "positions"_a, "rope_table"_a, "wanted"_a, "scores"_a,
             "count"_a, "num_logits"_a, "token_ids"_a.none() = none, "panels"_a.none() = none)
        .def("fold", &Model::fold, "store"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("project", &project, "hidden"_a, "scores"_a);
}

}  // namespace outpace
