// What moves single tokens' scores before they race, for each node on its own path: the numbers of outpace/core/adjust.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace outpace {

/// In the order in which they are applied. A repetition penalty of 1 and other penalties of 0 change nothing.
struct Adjustments {
    std::vector<std::pair<int, float>> bias;  // token, what is added
    float repetition, presence, frequency;    // of tokens of prompt or answer; of tokens of the answer
    int min_tokens;                           // before so many the answer does not end
    std::vector<int> stops;
    int prompt;                               // tokens

    bool repeats() const { return repetition != 1.0f; }
    bool counts() const { return presence != 0.0f || frequency != 0.0f; }
};

/// The adjustments of one request, and what of its text they depend on.
class Adjusting {
  public:
    explicit Adjusting(Adjustments asked) : asked_(std::move(asked)) {}

    /// The tokens of the text that are known.
    int size() const { return size_; }

    /// The text goes on.
    void extend(const std::vector<int>& tokens);

    /// Looks up where the scores of what is written stand among these tokens, which rows of a reduced vocabulary then need
    /// not do one by one.
    void locate(const int64_t* names, int held);

    /// Adjusts a row's scores [held] of the tokens `names`, rising (null: 0, 1, ...), for what follows the text and the
    /// drafted tokens `path` behind it. May be called by several threads at once.
    void apply(float* scores, const int64_t* names, int held, const std::vector<int>& path) const;

  private:
    struct Written {
        int token;
        int count;  // in the answer
    };

    float penalised(float score, int count) const;
    float* score_of(float* scores, const int64_t* names, int held, std::size_t written) const;

    Adjustments asked_;
    int size_ = 0;
    std::vector<Written> written_;  // that have a penalty, each once
    std::unordered_map<int, std::size_t> places_;  // of tokens among them
    const int64_t* names_ = nullptr;  // that were looked up last, and how many
    int held_ = 0;
    std::vector<int> columns_;  // of what is written, as far as it was looked up: its place among them, or below 0
};

}  // namespace outpace
