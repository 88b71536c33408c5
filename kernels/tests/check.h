// Declarations shared by the tests.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace outpace {
namespace {

inline void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

}  // namespace

void test_ranking();
void test_fetching();
void test_sources();
uint64_t test_experts();  // returns a fingerprint of experts
uint64_t test_stored_powers();  // returns a fingerprint of MXFP4's weights
uint64_t test_gemma4();  // returns a fingerprint of two sizes of heads
uint64_t test_recurrent();  // returns a fingerprint of recurrent layers
uint64_t test_stored();  // returns a fingerprint of its products
uint64_t test_stored_ours();  // the same for formats that no GGUF file has
struct Sizes;
uint64_t test_extras(const Sizes& sizes);  // returns a fingerprint of optional features of passes

}  // namespace outpace
