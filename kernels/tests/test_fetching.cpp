// Whether few rows prefetch weights: known by the processor's maker, or measured.
#include "check.h"
#include "fetch_trial.h"

namespace outpace {
namespace {

using Time = std::chrono::steady_clock::duration;

/// Returns a finished trial in which prefetching layers take `prefetching` and others `others`, except one that is
/// interrupted.
FetchTrial tried(int layers, int prefetching, int others) {
    FetchTrial trial({false, false});
    bool first_prefetched = false;
    for (int pass = 0; pass < 1000; ++pass) {
        trial.begin_pass();
        if (!trial.wants(1)) break;
        check(trial.prefetches(0) != trial.prefetches(1), "layers that take turns");
        check(pass == 0 || trial.prefetches(0) != first_prefetched, "passes that take turns");
        first_prefetched = trial.prefetches(0);
        for (int layer = 0; layer < layers; ++layer)
            trial.note(layer, Time(pass == 1 && layer == 1 ? 1000 : trial.prefetches(layer) ? prefetching : others));
    }
    check(!trial.wants(1), "a trial that ends");
    return trial;
}

}  // namespace

void test_fetching() {
    for (int layers : {3, 30})
        for (bool is_better : {false, true}) {
            const FetchTrial trial = tried(layers, is_better ? 4 : 5, is_better ? 5 : 4);
            for (int layer = 0; layer < layers; ++layer) check(trial.prefetches(layer) == is_better, "the faster way stays");
        }
    FetchTrial known({true, false});
    known.begin_pass();
    check(known.prefetches(0) && known.prefetches(1) && !known.wants(1), "where the maker is known, nothing is tried");
    FetchTrial open({false, false});
    open.begin_pass();
    check(open.wants(1) && !open.wants(2), "only passes of one row are timed");
}

}  // namespace outpace
