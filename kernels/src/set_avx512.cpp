#include "lanes_avx512.h"
// The order matters: the following headers are compiled for the lanes above.
#include "attention.h"
#include "recurrent.h"
#include "routing.h"
#include "product.h"
#include "ranking.h"
#include "filtering.h"
#include "multiply_rate.h"

namespace outpace {

extern const Kernels avx512_kernels;
const Kernels avx512_kernels = {
    "avx512_vnni", kQueries, normalize, add_normed, norm_rows, product, gated_product, rotate, attend, recur,
    score_experts, choose_experts, mix_experts, cap_logits, join_embeddings, gate_row, rank, multiply_only};

}  // namespace outpace
