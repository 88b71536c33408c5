// Declarations shared by the files of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "model.h"
#include "proposals.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace outpace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

using Tokens = Array<const int64_t, 1>;

/// Tokens, best first, and their values.
using ProposalTuple = std::tuple<std::vector<int64_t>, std::vector<double>>;

inline ProposalTuple to_tuple(const Proposals& proposals) { return {proposals.tokens, proposals.values}; }

inline ProposalRows share(std::vector<Proposals> rows) {
    const int count = static_cast<int>(rows.size());
    return {std::make_shared<const std::vector<Proposals>>(std::move(rows)), 0, count};
}

/// top_k, top_p and min_p.
using FilterTuple = std::tuple<int, double, double>;

/// Throws std::invalid_argument for values that are not valid filters.
Filters filters_of(const FilterTuple& given);

/// Binds the passes of a model: `forward`, `score` and `project`.
void bind_forward(nb::class_<Model>& model);

/// Binds `rank`.
void bind_rank(nb::module_& m);

/// Binds token trees.
void bind_tree(nb::module_& m);

}  // namespace outpace
