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
};

/// The adjustments of one request, and what of its text they depend on.
class Adjusting {
  public:
    explicit Adjusting(Adjustments asked) : asked_(std::move(asked)) {}

    /// The tokens of the text that are known.
    int size() const { return size_; }

    /// The text goes on.
    void extend(const std::vector<int>& tokens);

    /// Adjusts a row's scores [held] of the tokens `names`, rising (null: 0, 1, ...), for what follows the text and the
    /// drafted tokens `path` behind it. May be called by several threads at once.
    void apply(float* scores, const int64_t* names, int held, const std::vector<int>& path) const;

  private:
    struct Written {
        int token;
        int count;  // in the answer
    };

    float penalised(float score, int count) const;

    Adjustments asked_;
    int size_ = 0;
    std::vector<Written> written_;  // that have a penalty, each once
    std::unordered_map<int, std::size_t> places_;  // of tokens among them
};

}  // namespace outpace
