// Weight matrices in int8, packed in panels for products with few rows.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "layout.h"
#include "memory.h"

namespace outpace {

/// W [outputs, inputs] rounded to int8 in groups of kGroup inputs.
///
/// scale = (largest |w| of the group / 127) rounded up to bfloat16; q = round(w / scale), stored as q + 128.
/// Panels of 32 outputs follow each other, in each its groups, in each: 32 scales, then for every 4 inputs 32 x 4 bytes.
class Matrix {
  public:
    /// `bias` may be null.
    Matrix(const float* weights, const float* bias, int outputs, int inputs);

    /// A copy of another whose panels lie in `home` from byte `start` on.
    Matrix(const Matrix& other, std::shared_ptr<const Block<uint8_t>> home, std::size_t start);

    int outputs() const { return outputs_; }
    int inputs() const { return inputs_; }
    int groups() const { return groups_; }
    std::size_t bytes() const { return panel_bytes() + bias_.size() * sizeof(float); }
    std::size_t panel_bytes() const { return static_cast<std::size_t>(panels().count()) * groups_ * kBlock; }
    Panels panels() const { return {blocks_, bias_.empty() ? nullptr : bias_.data(), outputs_, groups_}; }

    /// The weights of one output as they are used: q * scale. `out` has room for whole groups.
    void row(int output, float* out) const;

  private:
    void pack_group(const float* weights, int count, int output, int group);
    uint8_t* block(int output, int group) const;

    int outputs_, inputs_, groups_;
    std::vector<float> bias_;
    std::shared_ptr<const Block<uint8_t>> home_;
    uint8_t* blocks_;  // within home_
};

/// Copies take the place of the matrices, one behind the other in one block. Alone, a small model's matrices would not
/// fill large pages; from small ones a pass takes a fifth longer. What is null stays null.
void gather(std::initializer_list<std::shared_ptr<const Matrix>*> matrices);

}  // namespace outpace
