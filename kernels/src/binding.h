// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace outpace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

/// The passes of a model: `forward` and `project`.
void bind_forward(nb::class_<Model>& model);

}  // namespace outpace
