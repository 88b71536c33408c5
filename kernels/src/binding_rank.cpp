// Python bindings of ranking: the best tokens of rows of logits.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "binding.h"

namespace outpace {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;  // any strides

/// Returns the best tokens of every row after temperature, noise and filters; an empty row has no order.
std::vector<ProposalTuple> rank(const Rows& scores, int count, const std::vector<double>& temperatures,
                                const std::vector<uint64_t>& keys, const Tokens& tokens, bool whole,
                                const std::vector<FilterTuple>& filters) {
    const std::size_t rows = scores.shape(0), size = scores.shape(1);
    if (count < 1) throw std::invalid_argument("count must be at least 1");
    if (size > 1 && scores.stride(1) != 1) throw std::invalid_argument("a row of scores must lie in one piece");
    if (temperatures.size() != rows || (!keys.empty() && keys.size() != rows))
        throw std::invalid_argument("every row must have a temperature, and a key if any has");
    if (tokens.is_valid() && tokens.size() != size) throw std::invalid_argument("tokens has the wrong shape");
    if (!filters.empty() && filters.size() != rows)
        throw std::invalid_argument("every row must have filters if any has");
    std::vector<Filters> row_filters;
    for (const FilterTuple& tuple : filters) row_filters.push_back(filters_of(tuple));
    for (double temperature : temperatures)
        if (!(temperature > 0)) throw std::invalid_argument("temperatures must be above 0");
    const nb::gil_scoped_release release;
    static const Kernels* kernels = find_kernels("");
    std::vector<ProposalTuple> best;
    for (std::size_t row = 0; row < rows; ++row)
        best.push_back(to_tuple(best_of(*kernels,
                                {scores.data() + static_cast<int64_t>(row) * scores.stride(0),
                                 tokens.is_valid() ? tokens.data() : nullptr, static_cast<int>(size), temperatures[row],
                                 keys.empty() ? nullptr : &keys[row], whole,
                                row_filters.empty() ? Filters{0, 1.0, 0.0} : row_filters[row]},
                                count)));
    return best;
}

}  // namespace

Filters filters_of(const FilterTuple& given) {
    const auto [top_k, top_p, min_p] = given;
    if (top_k < 0) throw std::invalid_argument("top_k must be at least 0");
    if (!(top_p > 0.0 && top_p <= 1.0)) throw std::invalid_argument("top_p must be above 0 and at most 1");
    if (!(min_p >= 0.0 && min_p <= 1.0)) throw std::invalid_argument("min_p must be between 0 and 1");
    return {top_k, top_p, min_p};
}

void bind_rank(nb::module_& m) {
    m.def("rank", &rank, "scores"_a, "count"_a, "temperatures"_a, "keys"_a, "tokens"_a.none(), "whole"_a,
          "filters"_a = std::vector<FilterTuple>{});
}

}  // namespace outpace
