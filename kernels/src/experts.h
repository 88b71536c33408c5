// A layer's experts: their weights, which stay in the file until an expert is chosen, and the plan of a pass.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "router.h"
#include "stored.h"
#include "weight_arena.h"

namespace outpace {

/// An expert that rows of a pass chose, and its pairs of row and expert, which are consecutive.
struct ChosenExpert {
    int expert, slot;
    int first_pair, num_pairs;
    bool is_new;  // not packed yet
};

/// Experts that run together: all at once, unless fewer are held.
struct ExpertWave {
    int first, count;
    int num_new;  // they come last
};

/// What a pass computes in one layer. Members of the team that are late read the waves, so each layer has its own.
struct ExpertPlan {
    std::vector<int> chosen;  // [rows, used], rising
    std::vector<float> weights;  // [rows, shares]
    std::vector<int> pairs;  // [rows, used]: numbers of pairs
    std::vector<int> pair_rows;
    std::vector<ChosenExpert> experts;
    std::vector<ExpertWave> waves;
    bool has_failed;  // for lack of memory
};

/// W of every expert: 16 gates, 16 ups, ... from hidden; then hidden from the gated outputs. Packed experts are in slots;
/// when all are taken, the expert that was not used for the longest time is dropped.
class Experts {
  public:
    /// The matrices of the experts in a file, all of the same formats and sizes. `is_rounded`: to int8, as floats always
    /// are. `is_mapped`: pages of packed experts can be released. Throws std::invalid_argument for wrong sizes.
    struct Source {
        std::vector<Stored> gate_up, down;
        bool is_rounded, is_mapped;
        std::vector<int> gate_up_rows, down_rows;  // which the above refer to
        std::shared_ptr<const void> owner;  // of the data
    };
    Experts(Router router, Source source, std::vector<float> gate_up_bias, std::vector<float> down_bias,
            std::shared_ptr<WeightArena> arena);

    const Router& router() const { return router_; }
    const std::shared_ptr<WeightArena>& arena() const { return arena_; }
    int width() const { return matrices_[0].outputs / 2; }
    int hidden() const { return matrices_[1].outputs; }
    int count() const { return router_.experts; }
    bool takes_quarters(int which) const { return matrices_[which].takes_quarters; }
    /// Bytes of weights that a row reads.
    std::size_t row_bytes() const {
        return router_.used * expert_bytes() + router_.weights.bytes();
    }
    std::size_t expert_bytes() const { return matrices_[0].bytes() + matrices_[1].bytes(); }

    /// The largest number of experts that stay packed. Setting it drops all of them.
    int held() const { return held_; }
    void hold(int count);
    int num_packed() const { return num_packed_; }

    /// Packs all experts. Throws std::domain_error for numbers that are not finite or too large.
    void pack_all();
    /// Lets the source go, once all experts are packed.
    void release_source() { source_ = {}; }

    /// Numbers the pairs and assigns slots.
    void plan(int rows, ExpertPlan& plan);

    /// Number of units of packing an expert: its panels. A unit returns what is wrong with the file, or null.
    int units() const { return matrices_[0].panels() + matrices_[1].panels(); }
    const char* pack(const ChosenExpert& chosen, int unit);

    /// Releases the file's pages of an expert; a later access reads them again.
    void release(const ChosenExpert& chosen) const;

    /// Forgets an expert that could not be packed.
    void drop(int expert);

    /// An expert's matrix: 0, gates and ups; 1, down.
    Panels panels(const ChosenExpert& chosen, int which) const;

  private:
    /// One of the two matrices, the same for all experts.
    struct Shape {
        Format format;
        int outputs, groups;
        bool takes_quarters;
        std::vector<float> bias;  // [experts, outputs in whole panels] or empty

        int panels() const { return round_up(outputs, kPanel) / kPanel; }
        int64_t panel_bytes() const { return outpace::panel_bytes(format, groups); }
        std::size_t bytes() const { return panels() * panel_bytes(); }
    };
    struct Slot {
        WeightArena::Allocation place;
        Section sections[2];
        int expert = -1;
        int64_t used = 0;  // the wave that used it last
    };

    int free_slot();

    Router router_;
    Source source_;
    Shape matrices_[2];
    std::shared_ptr<WeightArena> arena_;
    int held_;
    std::vector<Slot> slots_;
    std::vector<int> slot_of_;  // [experts]; -1: not packed
    int64_t clock_ = 0;
    int num_packed_ = 0;
};

}  // namespace outpace
