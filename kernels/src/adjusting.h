// Penalties, biases and bans of single tokens for each node on its own path, with the bits of outpace/core/adjust.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace outpace {

/// Adjustments in the order in which they are applied. A repetition penalty of 1 and other penalties of 0 change
/// nothing.
struct Adjustments {
    std::vector<std::pair<int, float>> bias;  // token, added value
    float repetition, presence, frequency;  // repetition: prompt and answer; presence and frequency: answer
    int min_tokens;  // the answer may not end before this number of tokens
    std::vector<int> stops;
    int prompt;  // number of tokens in the prompt

    bool repeats() const { return repetition != 1.0f; }
    bool counts() const { return presence != 0.0f || frequency != 0.0f; }
};

/// The adjustments of one request, and the parts of its text that they depend on.
class Adjusting {
  public:
    explicit Adjusting(Adjustments asked) : asked_(std::move(asked)) {}

    /// Number of known tokens of the text.
    int size() const { return size_; }

    /// Appends tokens to the text.
    void extend(const std::vector<int>& tokens);

    /// Finds the columns of the written tokens among `names`, so that rows of a reduced vocabulary need not search
    /// them.
    void locate(const int64_t* names, int held);

    /// Adjusts a row of logits [held] of the tokens `names`, ascending (null: 0, 1, ...), for what follows the text and
    /// the drafted tokens `path`. Several threads may call it at once.
    void apply(float* scores, const int64_t* names, int held, const std::vector<int>& path) const;

  private:
    struct Written {
        int token;
        int count;  // occurrences in the answer
    };

    float penalised(float score, int count) const;
    float* score_of(float* scores, const int64_t* names, int held, std::size_t written) const;

    Adjustments asked_;
    int size_ = 0;
    std::vector<Written> written_;  // tokens with a penalty, without repetition
    std::unordered_map<int, std::size_t> places_;  // index of a token in written_
    const int64_t* names_ = nullptr;  // tokens of the last `locate`, and their number
    int held_ = 0;
    std::vector<int> columns_;  // column of each written token, negative if it has none
};

}  // namespace outpace
