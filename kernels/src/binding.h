// What the files of the Python module share.
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

/// The best `count` tokens of a row; none where it has no order.
Offer offer_of(const Kernels& kernels, const Ranking& task, int count);

/// top_k, top_p and min_p.
using FilterTuple = std::tuple<int, double, double>;

/// Throws std::invalid_argument for what no filter can be.
Filters filters_of(const FilterTuple& given);

/// The passes of a model: `forward`, `score` and `project`.
void bind_forward(nb::class_<Model>& model);

/// `rank`.
void bind_rank(nb::module_& m);

/// A pair's rounds, what they take and give.
void bind_pair(nb::module_& m);

}  // namespace outpace
