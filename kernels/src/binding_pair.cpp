// Python bindings of whole rounds: plans and trees in, outcomes out.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "binding.h"
#include "pair.h"

namespace outpace {
namespace {

using Numbers = std::vector<int>;
using Values = std::vector<double>;
using Turns = Array<const float, 3>;

/// A model with the arrays that it reads, which it keeps alive.
struct HeldSide {
    Model* model;
    Tokens names;
    int held;
    Turns turns;
    int last_position, last_token;

    Side side() const {
        return {model, names.is_valid() ? names.data() : nullptr, held, turns.data(),
                static_cast<int>(turns.shape(0)), last_position, last_token};
    }
};

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

void init_side(HeldSide* place, Model* model, Tokens names, int held, Turns turns, int last_position, int last_token) {
    require(held >= 1 && held <= model->outputs() && (!names.is_valid() || static_cast<int>(names.size()) == held),
            "names has the wrong shape");
    require(static_cast<int>(turns.shape(1) * turns.shape(2)) == model->shape().turn_floats() && turns.shape(0) > 0,
            "turns has the wrong shape");
    require(last_position >= 0 && last_token >= 0, "the last position and token are at least 0");
    new (place) HeldSide{model, std::move(names), held, std::move(turns), last_position, last_token};
}

void init_plan(Plan* place, double temperature, double open, double coverage, int budget, int deepest, int explores,
               double price, double cost, double trust, double row, double least, double copied, Values growth,
               std::vector<bool> due) {
    require(temperature > 0.0, "temperature must be above 0");
    require(budget >= 1 && deepest >= 0, "budget is at least 1, deepest at least 0");
    new (place) Plan{{temperature, open, coverage}, budget, deepest, explores, price, cost, trust, row, least, copied,
                     std::move(growth), std::move(due)};
}

void init_noise(Noise* place, double temperature, uint64_t seed, uint64_t choice, int top_k, double top_p,
                double min_p) {
    require(temperature >= 0.0, "temperature is at least 0");
    new (place) Noise{temperature, seed, choice, filters_of({top_k, top_p, min_p})};
}

void init_copies(Copies* place, int longest, int tokens, int branches, int window, double least, int places) {
    require(longest >= 1 && longest <= kLongestCopied, "n-grams of 1 to 3 tokens are copied");
    require(tokens >= 1 && branches >= 1 && window >= 1, "tokens, branches and window are at least 1");
    require(places >= branches, "places are at least as many as branches");
    new (place) Copies({longest, tokens, branches, window, least, places});
}

void extend(Copies& copies, const Numbers& tokens) {
    for (int token : tokens) require(token >= 0 && token < 1 << 21, "a token is out of range");
    copies.extend(tokens);
}

void init_adjusting(Adjusting* place, std::vector<std::pair<int, float>> bias, float repetition, float presence,
                    float frequency, int min_tokens, Numbers stops, int prompt) {
    require(repetition > 0.0f, "a repetition penalty is above 0");
    require(min_tokens >= 0 && prompt >= 0, "min_tokens and prompt are at least 0");
    for (const auto& [token, value] : bias) require(token >= 0, "a token is at least 0");
    for (int stop : stops) require(stop >= 0, "a token is at least 0");
    new (place) Adjusting({std::move(bias), repetition, presence, frequency, min_tokens, std::move(stops), prompt});
}

void go_on(Adjusting& adjusting, const Numbers& tokens) {
    for (int token : tokens) require(token >= 0, "a token is at least 0");
    adjusting.extend(tokens);
}

/// Adjusts the logits of a row in place.
void adjust_row(const Adjusting& adjusting, const Array<float, 1>& scores, Tokens names, const Numbers& path) {
    require(!names.is_valid() || names.size() == scores.size(), "names has the wrong shape");
    adjusting.apply(scores.data(), names.is_valid() ? names.data() : nullptr, static_cast<int>(scores.size()), path);
}

void init_drafted(Drafted* place, Store* target, int target_length, Store* draft, int draft_length, Numbers missing,
                  std::tuple<Numbers, Numbers, Values, Values> tree, const Plan& plan, int rows, bool follows,
                  int most_depth, int left, Numbers stops, Copies* copies, Values log_rates, const Noise& noise,
                  Adjusting* adjusting) {
    auto& [tokens, parents, scores, chances] = tree;
    const std::size_t size = tokens.size();
    require(size > 0 && parents.size() == size && scores.size() == size && chances.size() == size,
            "a tree has a token, a parent, a score and a chance for every node");
    for (std::size_t node = 0; node < size; ++node)
        require(node ? parents[node] >= 0 && parents[node] < static_cast<int>(node) : parents[0] == kNoParent,
                "a parent stands before its child, and the root has none");
    for (std::size_t node = 1; node < size; ++node)
        require(scores[node] <= scores[parents[node]] && chances[node] <= chances[parents[node]],
                "a child is as likely as its parent at most");
    require(target_length >= 0 && draft_length >= 0, "lengths are at least 0");
    require(!copies || log_rates.size() == kCopyKinds, "copies have a rate for every kind");
    new (place) Drafted{{target, target_length}, {draft, draft_length}, std::move(missing), std::move(tokens),
                        std::move(parents), std::move(scores), std::move(chances), plan, rows, follows, most_depth,
                        left, std::move(stops), copies, std::move(log_rates), noise, adjusting};
}

std::vector<Round> carry(Pair& pair, const HeldSide& target, const HeldSide& draft, const Growing& growing,
                         int proposed, const PassTimes& times, const std::vector<Drafted*>& requests, int most,
                         double seconds) {
    require(proposed >= 2, "a draft proposes two tokens at least");
    require(!times.seconds.empty(), "the time of a pass over one row is to be known");
    for (const Drafted* request : requests) require(request != nullptr, "a request is missing");
    const Side one = target.side(), other = draft.side();
    const nb::gil_scoped_release release;
    return pair.carry_out(one, other, growing, proposed, times, requests, most, seconds);
}

std::vector<std::tuple<double, double, bool>> layers_of(const Outcome& outcome) {
    std::vector<std::tuple<double, double, bool>> layers;
    for (const Grown& one : outcome.layers) layers.emplace_back(one.worth, one.at_leaves, one.counts);
    return layers;
}

std::vector<std::tuple<Values, int>> picked_of(const Outcome& outcome) {
    std::vector<std::tuple<Values, int>> picked;
    for (const Picked& one : outcome.picked) picked.emplace_back(one.values, one.number);
    return picked;
}

std::vector<std::tuple<double, int, bool>> forwards_of(const Round& round) {
    std::vector<std::tuple<double, int, bool>> forwards;
    for (const Forward& one : round.forwards) forwards.emplace_back(one.seconds, one.requests, one.is_step);
    return forwards;
}

}  // namespace

void bind_pair(nb::module_& m) {
    nb::class_<HeldSide>(m, "Side")
        .def("__init__", &init_side, "model"_a, "names"_a.none(), "held"_a, "turns"_a, "last_position"_a,
             "last_token"_a, nb::keep_alive<1, 2>());

    nb::class_<Plan>(m, "Plan").def("__init__", &init_plan, "temperature"_a, "open"_a, "coverage"_a, "budget"_a,
                                    "deepest"_a, "explores"_a, "price"_a, "cost"_a, "trust"_a, "row"_a, "least"_a,
                                    "copied"_a, "growth"_a, "due"_a);

    nb::class_<PassTimes>(m, "PassTimes").def(
        "__init__",
        [](PassTimes* place, Values seconds, int widest, std::vector<bool> untimed) {
            new (place) PassTimes{std::move(seconds), widest, std::move(untimed)};
        },
        "seconds"_a, "widest"_a, "untimed"_a);

    nb::class_<Growing>(m, "Growing")
        .def("__init__", [](Growing* place, int width, int tree_nodes, double floor) {
            require(width >= 1 && tree_nodes >= 2, "width is at least 1, tree_nodes at least 2");
            new (place) Growing{width, tree_nodes, floor};
        }, "width"_a, "tree_nodes"_a, "floor"_a);

    nb::class_<Noise>(m, "Noise")
        .def("__init__", &init_noise, "temperature"_a, "seed"_a, "choice"_a, "top_k"_a, "top_p"_a, "min_p"_a);

    nb::class_<Copies>(m, "Copies")
        .def("__init__", &init_copies, "longest"_a, "tokens"_a, "branches"_a, "window"_a, "least"_a, "places"_a)
        .def_prop_ro("size", &Copies::size)
        .def_prop_ro("places", &Copies::places)
        .def("extend", &extend, "tokens"_a);

    nb::class_<Adjusting>(m, "Adjusting")
        .def("__init__", &init_adjusting, "bias"_a, "repetition"_a, "presence"_a, "frequency"_a, "min_tokens"_a, "stops"_a,
             "prompt"_a)
        .def_prop_ro("size", &Adjusting::size)
        .def("extend", &go_on, "tokens"_a)
        .def("locate", [](Adjusting& adjusting, const Tokens& names) {
            adjusting.locate(names.data(), static_cast<int>(names.size()));
        }, "names"_a)
        .def("apply", &adjust_row, "scores"_a, "names"_a.none(), "path"_a);

    nb::class_<Drafted>(m, "Drafted")
        .def("__init__", &init_drafted, "target"_a, "target_length"_a, "draft"_a, "draft_length"_a, "missing"_a,
             "tree"_a, "plan"_a, "rows"_a, "follows"_a, "most_depth"_a, "left"_a, "stops"_a,
             "copies"_a.none(), "log_rates"_a, "noise"_a, "adjusting"_a.none() = nb::none(), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 14>(), nb::keep_alive<1, 17>())
        .def_prop_ro("target_length", [](const Drafted& one) { return one.target.length; })
        .def_prop_ro("draft_length", [](const Drafted& one) { return one.draft.length; });

    nb::class_<Outcome>(m, "Outcome")
        .def_ro("known", &Outcome::known)
        .def_ro("tokens", &Outcome::tokens)
        .def_ro("parents", &Outcome::parents)
        .def_ro("scores", &Outcome::scores)
        .def_ro("picks", &Outcome::picks)
        .def_ro("path", &Outcome::path)
        .def_ro("is_trial", &Outcome::is_trial)
        .def_ro("is_fewer", &Outcome::is_fewer)
        .def_ro("copied", &Outcome::copied)
        .def_ro("planted", &Outcome::planted)
        .def_prop_ro("layers", &layers_of)
        .def_prop_ro("picked", &picked_of);

    nb::class_<Round>(m, "Round")
        .def_prop_ro("outcomes", [](const Round& round) {
            std::vector<const Outcome*> outcomes;
            for (const Outcome& one : round.outcomes) outcomes.push_back(&one);
            return outcomes;
        }, nb::rv_policy::reference_internal)
        .def_prop_ro("forwards", &forwards_of)
        .def_ro("copy_seconds", &Round::copy_seconds)
        .def_ro("target_seconds", &Round::target_seconds)
        .def_ro("seconds", &Round::seconds);

    nb::class_<Pair>(m, "Pair")
        .def(nb::init<>())
        .def("carry_out", &carry, "target"_a, "draft"_a, "growing"_a, "proposed"_a, "times"_a, "requests"_a, "most"_a,
             "seconds"_a);
}

}  // namespace outpace
