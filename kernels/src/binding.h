// Declarations shared by the files of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <tuple>
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
using Offer = std::tuple<std::vector<int64_t>, std::vector<double>>;

/// Returns the best `count` tokens of a row, or none if it has no order.
Offer offer_of(const Kernels& kernels, const Ranking& task, int count);

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
