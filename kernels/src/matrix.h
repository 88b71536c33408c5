// Weight matrices packed in panels for products with few rows: rounded to int8, or in a file's format.
#pragma once

#include <memory>
#include <vector>

#include "layout.h"
#include "weight_arena.h"
#include "stored.h"

namespace outpace {

/// W [outputs, inputs]. Panels of 32 outputs are consecutive, in the formats of formats.h; int8 is Q8_0.
class Matrix {
  public:
    /// Rounds floats to int8. `bias` may be null. Without an `arena`, here and below, the matrix has its own memory.
    /// Throws std::domain_error for a weight that is not finite or too large.
    Matrix(const float* weights, const float* bias, int outputs, int inputs, int threads = 1,
           WeightArena* arena = nullptr);

    /// Packs a file's weights; floats are rounded to int8. Throws std::invalid_argument for wrong sizes,
    /// std::domain_error for a scale or a float that is not finite or too large.
    Matrix(const Stored& stored, const float* bias, int threads = 1, WeightArena* arena = nullptr);

    /// Rounds another matrix to int8.
    Matrix(const Matrix& other, int threads, WeightArena* arena = nullptr);

    int outputs() const { return outputs_; }
    int inputs() const { return inputs_; }
    int groups() const { return groups_; }
    /// Whether its activations are rounded by quarters of groups.
    bool takes_quarters() const;
    std::size_t bytes() const { return panel_bytes() + bias_.size() * sizeof(float); }
    std::size_t panel_bytes() const;
    Panels panels() const {
        return {sections_.data(), static_cast<int>(sections_.size()), bias_.empty() ? nullptr : bias_.data(), outputs_,
                groups_};
    }

    /// Dequantizes the weights of one output. `out` has space for whole groups.
    void row(int output, float* out) const;

    /// Formats of its panels, in order.
    std::vector<Format> formats() const;

  private:
    template <class F>
    void pack(int threads, WeightArena* arena, F read);
    void read(int output, int group, float* out) const;  // [kGroup]
    void set_bias(const float* bias);
    void allocate(std::vector<Section> sections, WeightArena* arena);
    uint8_t* panel(int number) const;

    int outputs_, inputs_, groups_;
    std::vector<float> bias_;
    std::shared_ptr<const Block<uint8_t>> block_;
    std::vector<Section> sections_;  // within block_
};

}  // namespace outpace
