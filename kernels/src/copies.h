// What followed the last tokens of a text where they stood before: places of equal n-grams, and the branches of a token
// tree that copy what stands there. What outpace/drafters/ngram.py, _index.py and _grafter.py do in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planned_tree.h"

namespace outpace {

constexpr std::size_t kCopyKinds = 36;
constexpr int kLongestCopied = 3;  // tokens of an n-gram: three have room in one key

/// How copies are made; natural logarithms of chances.
struct Copying {
    int longest;    // the last tokens that are matched, fewer where there is no match
    int tokens;     // copied of each match
    int branches;   // the most different copies
    int window;     // the last tokens of the text in which matches are sought
    double least;   // what is less likely to be reached is not planted
    int places;     // that are looked at: those with the longest matches are copied
};

/// Tokens that were planted below a node, each with its kind.
using Planted = std::vector<std::pair<int, int>>;

class Copies {
  public:
    explicit Copies(const Copying& copying);

    /// The tokens of the text that are known.
    int size() const { return static_cast<int>(tokens_.size()); }

    int places() const { return copying_.places; }

    /// The text goes on.
    void extend(const std::vector<int>& tokens);

    /// Plants branches below the root; `log_rates` by kind say how often such copies come true. What was planted below
    /// each node is added to `planted`.
    void plant(PlannedTree& tree, const std::vector<double>& log_rates, std::vector<Planted>& planted) const;

  private:
    struct Match {
        int length, place;
    };
    struct Chains {
        std::unordered_map<uint64_t, int> heads;  // by n-gram: the latest place behind it
        std::vector<int> before;                  // by place: the one before it
    };

    uint64_t key(int end, int length) const;
    std::vector<Match> matches() const;
    void branch(PlannedTree& tree, const Match& match, bool is_first, const std::vector<double>& log_rates,
                std::vector<Planted>& planted) const;

    Copying copying_;
    std::vector<int> tokens_;
    Chains chains_[kLongestCopied];  // by length less one
};

}  // namespace outpace
