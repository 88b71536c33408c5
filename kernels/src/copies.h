// Copies of what followed earlier places of the last tokens: an index of n-grams, and branches of a token tree. It does
// what outpace/drafters/ngram.py does in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planned_tree.h"

namespace outpace {

constexpr std::size_t kCopyKinds = 36;
constexpr int kLongestCopied = 3;  // tokens of an n-gram; three fit into one key

/// Options of copying; natural logarithms of probabilities.
struct Copying {
    int longest;  // most tokens to match
    int tokens;  // tokens copied of each match
    int branches;  // most different copies
    int window;  // number of last tokens in which matches are searched
    double least;  // nodes less likely to be reached are not added
    int places;  // places looked at; those with the longest matches are copied
};

/// Tokens added below a node, each with its kind.
using Planted = std::vector<std::pair<int, int>>;

class Copies {
  public:
    explicit Copies(const Copying& copying);

    /// Number of known tokens of the text.
    int size() const { return static_cast<int>(tokens_.size()); }

    int places() const { return copying_.places; }

    /// Appends tokens to the text.
    void extend(const std::vector<int>& tokens);

    /// Adds branches below the root. `log_rates` by kind are the logarithms of measured acceptance rates. The tokens
    /// added below each node are appended to `planted`.
    void plant(PlannedTree& tree, const std::vector<double>& log_rates, std::vector<Planted>& planted) const;

  private:
    struct Match {
        int length, place;
    };
    struct Chains {
        std::unordered_map<uint64_t, int> heads;  // by n-gram: the latest position after it
        std::vector<int> before;  // by position: the one before it
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
