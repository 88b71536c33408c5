// Python bindings of token trees.
#include <nanobind/make_iterator.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "binding.h"
#include "tree.h"

namespace outpace {
namespace {

/// A column of a tree's nodes, which behaves like a Python list that only its tree can change.
enum class Kind { tokens, parents, scores, roles, ids, sources, depths };

/// Names of sources, shared by all trees; the first is that of an unknown source.
std::vector<std::string>& source_names() {
    static std::vector<std::string> names{""};
    return names;
}

int16_t number_of(const std::string& name) {
    auto& names = source_names();
    const auto place = std::find(names.begin(), names.end(), name);
    if (place != names.end()) return static_cast<int16_t>(place - names.begin());
    if (names.size() >= 32767) throw std::invalid_argument("there are too many sources");
    names.push_back(name);
    return static_cast<int16_t>(names.size() - 1);
}

struct Column {
    nb::object owner;  // keeps the tree alive
    TokenTree* tree;
    Kind kind;

    nb::object at(Py_ssize_t node) const {
        switch (kind) {
            case Kind::tokens: return nb::steal(PyLong_FromLong(tree->tokens[node]));
            case Kind::parents: return nb::steal(PyLong_FromLong(tree->parents[node]));
            case Kind::scores: return nb::steal(PyFloat_FromDouble(tree->scores[node]));
            case Kind::roles: return nb::steal(PyLong_FromLong(tree->roles[node]));
            case Kind::ids: return nb::steal(PyLong_FromLongLong(tree->ids[node]));
            case Kind::depths: return nb::steal(PyLong_FromLong(tree->depths[node]));
            default: return nb::cast(source_names()[tree->sources[node]]);
        }
    }

    Py_ssize_t checked(Py_ssize_t node) const {
        if (node < 0) node += tree->size();
        if (node < 0 || node >= tree->size()) throw nb::index_error("no such node");
        return node;
    }

    nb::list list(Py_ssize_t first, Py_ssize_t step, Py_ssize_t count) const {
        PyObject* found = PyList_New(count);
        if (!found) throw nb::python_error();
        for (Py_ssize_t n = 0; n < count; ++n) PyList_SET_ITEM(found, n, at(first + n * step).release().ptr());
        return nb::steal<nb::list>(found);
    }
    nb::list list() const { return list(0, 1, tree->size()); }

    nb::object get(nb::handle key) const {
        if (PySlice_Check(key.ptr())) {
            Py_ssize_t first, end, step;
            if (PySlice_Unpack(key.ptr(), &first, &end, &step) < 0) throw nb::python_error();
            return list(first, step, PySlice_AdjustIndices(tree->size(), &first, &end, step));
        }
        const Py_ssize_t node = PyNumber_AsSsize_t(key.ptr(), PyExc_IndexError);
        if (node == -1 && PyErr_Occurred()) throw nb::python_error();
        return at(checked(node));
    }
};

template <Kind kind>
Column column(nb::pointer_and_handle<TokenTree> self) {
    return {nb::borrow(self.h), self.p, kind};
}

using DeltaTuple = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int>, std::vector<int>,
                              std::vector<double>>;

Delta to_delta(DeltaTuple given) {
    auto& [ids, parents, tokens, roles, log_probs] = given;
    if (parents.size() != ids.size() || tokens.size() != ids.size() || roles.size() != ids.size() ||
        log_probs.size() != ids.size())
        throw std::invalid_argument("every node needs an id, a parent, a token, a role and a log probability");
    return {std::move(ids), std::move(parents), std::move(tokens), std::move(roles), std::move(log_probs)};
}

DeltaTuple to_tuple(const Delta& delta) { return {delta.ids, delta.parents, delta.tokens, delta.roles, delta.log_probs}; }

ProposalRows to_rows(const std::vector<std::tuple<std::vector<int64_t>, std::vector<double>>>& rows) {
    std::vector<Proposals> found;
    for (const auto& [tokens, values] : rows) found.push_back({tokens, values});
    return share(std::move(found));
}

nb::object row_at(const ProposalRows& rows, nb::handle key) {
    if (PySlice_Check(key.ptr())) {
        Py_ssize_t first, end, step;
        if (PySlice_Unpack(key.ptr(), &first, &end, &step) < 0) throw nb::python_error();
        const auto count = PySlice_AdjustIndices(rows.count, &first, &end, step);
        if (step != 1) throw nb::index_error("rows are taken in order");
        return nb::cast(ProposalRows{rows.rows, rows.first + static_cast<int>(first), static_cast<int>(count)});
    }
    Py_ssize_t row = PyNumber_AsSsize_t(key.ptr(), PyExc_IndexError);
    if (row == -1 && PyErr_Occurred()) throw nb::python_error();
    if (row < 0) row += rows.count;
    if (row < 0 || row >= rows.count) throw nb::index_error("no such row");
    return nb::cast(to_tuple(rows.at(static_cast<int>(row))));
}

/// Refuses None in a list of trees or of what belongs to them.
template <class T>
void check_present(const std::vector<T*>& given) {
    if (std::find(given.begin(), given.end(), nullptr) != given.end())
        throw std::invalid_argument("a list of trees, maps, slots or pick models has None in it");
}

/// Adds proposals to several trees (see TokenTree::attach_offers) and records them; `offers` has the rows of all
/// frontiers, tree after tree. Returns the number of nodes of each tree that are new or confirmed.
std::vector<int> attach_offers(const std::vector<TokenTree*>& trees, const std::vector<std::vector<int>>& frontiers,
                               const ProposalRows& offers, const std::vector<OfferMap*>& maps,
                               const std::vector<PickModel*>& picks, const std::vector<int>& widths,
                               const std::vector<int>& max_children) {
    const std::size_t count = trees.size();
    if (frontiers.size() != count || maps.size() != count || picks.size() != count || widths.size() != count ||
        max_children.size() != count)
        throw std::invalid_argument("every tree needs a frontier, a map of offers, a pick model and limits");
    check_present(trees), check_present(maps), check_present(picks);
    std::vector<int> added;
    int first = 0;
    for (std::size_t n = 0; n < count; ++n) {
        const ProposalRows rows{offers.rows, offers.first + first, static_cast<int>(frontiers[n].size())};
        if ((first += rows.count) > offers.count) throw std::invalid_argument("every node needs its proposals");
        maps[n]->record(*trees[n], frontiers[n], rows);
        added.push_back(trees[n]->attach_offers(frontiers[n], rows, *picks[n], widths[n], max_children[n]));
    }
    return added;
}

/// Chooses the nodes of each tree to expand (see SlotMap::next).
std::vector<std::vector<int>> choose_frontiers(const std::vector<SlotMap*>& slots, const std::vector<TokenTree*>& trees,
                                               const std::vector<int>& counts, const std::vector<double>& floors,
                                               const std::vector<int>& deepest) {
    const std::size_t count = trees.size();
    if (slots.size() != count || counts.size() != count || floors.size() != count || deepest.size() != count)
        throw std::invalid_argument("every tree needs slots and limits");
    check_present(trees), check_present(slots);
    std::vector<std::vector<int>> found;
    for (std::size_t n = 0; n < count; ++n)
        found.push_back(slots[n]->next(*trees[n], counts[n], floors[n], deepest[n]));
    return found;
}

/// Follows the tokens `read(pick)`, for the picks of walked nodes alone, or the picks themselves (None).
std::pair<std::vector<int>, std::optional<int64_t>> follow(const TokenTree& tree, const nb::list& picks,
                                                           nb::handle read) {
    return tree.follow(static_cast<int>(picks.size()), [&](int node) {
        if (static_cast<std::size_t>(node) >= picks.size()) throw nb::index_error("a pick is gone");
        return nb::cast<int64_t>(read.is_none() ? nb::object(picks[node]) : read(picks[node]));
    });
}

}  // namespace

void bind_tree(nb::module_& m) {
    nb::class_<Column>(m, "Column")
        .def("__len__", [](const Column& column) { return column.tree->size(); })
        .def("__getitem__", &Column::get)
        .def("__setitem__",
             [](const Column& column, Py_ssize_t node, double score) {
                 if (column.kind != Kind::scores) throw nb::type_error("only path scores can be changed");
                 if (std::isnan(score)) throw std::invalid_argument("the path score is not a number");
                 column.tree->scores[column.checked(node)] = score;
             })
        .def("__iter__", [](const Column& column) { return nb::iter(column.list()); })
        .def("__eq__",
             [](const Column& column, nb::handle other) -> nb::object {
                 const bool is_column = nb::isinstance<Column>(other);
                 if (!is_column && !nb::isinstance<nb::list>(other)) return nb::borrow(Py_NotImplemented);
                 const nb::object list = is_column ? nb::cast<const Column&>(other).list() : nb::borrow(other);
                 return nb::bool_(column.list().equal(list));
             })
        .def("__repr__", [](const Column& column) { return nb::repr(column.list()); })
        .def("__contains__",
             [](const Column& column, nb::handle value) {
                 return nb::cast<bool>(column.list().attr("__contains__")(value));
             })
        .def("count", [](const Column& column, nb::handle value) { return column.list().attr("count")(value); })
        .def("index", [](const Column& column, nb::handle value) { return column.list().attr("index")(value); });

    nb::class_<TokenTree>(m, "TokenTree")
        .def(nb::init<int, int64_t, int64_t>(), "token"_a, "root_id"_a = 0, "next_id"_a = 1)
        .def("__len__", &TokenTree::size)
        .def_prop_ro("tokens", &column<Kind::tokens>)
        .def_prop_ro("parents", &column<Kind::parents>)
        .def_prop_ro("scores", &column<Kind::scores>)
        .def_prop_ro("roles", &column<Kind::roles>)
        .def_prop_ro("ids", &column<Kind::ids>)
        .def_prop_ro("sources", &column<Kind::sources>)
        .def_prop_ro("depths", &column<Kind::depths>)
        .def_rw("next_id", &TokenTree::next_id)
        .def_prop_rw("max_nodes",
                     [](const TokenTree& tree) {
                         return tree.max_nodes < 0 ? std::nullopt : std::optional<int>(tree.max_nodes);
                     },
                     [](TokenTree& tree, std::optional<int> count) { tree.max_nodes = count.value_or(-1); },
                     nb::for_setter(nb::arg("count").none()))
        .def_prop_rw("current_source", [](const TokenTree& tree) { return source_names()[tree.current_source]; },
                     [](TokenTree& tree, const std::string& name) { tree.current_source = number_of(name); })
        .def_rw("vocab_size", &TokenTree::vocab_size)
        .def_rw("_is_drawn", &TokenTree::is_drawn)
        .def_ro("num_confirmed", &TokenTree::num_confirmed)
        .def("add",
             [](TokenTree& tree, int parent, int token, double score, int role, int siblings,
                std::optional<int64_t> node_id) {
                 const int node = tree.add(parent, token, score, role, siblings, node_id.value_or(tree.next_id));
                 return node < 0 ? std::nullopt : std::optional<int>(node);
             },
             "parent"_a, "token"_a, "score"_a, "role"_a = 0, "siblings"_a = 1, "node_id"_a = nb::none())
        .def("attach_children",
             [](TokenTree& tree, const std::vector<std::tuple<double, int, int>>& children, int primary) {
                 std::vector<Child> found;
                 for (const auto& [score, parent, token] : children) found.push_back({score, parent, token});
                 tree.attach_children(found, primary);
             },
             "children"_a, "primary"_a)
        .def("chain", &TokenTree::chain, "parent"_a, "tokens"_a, "scores"_a)
        .def("child",
             [](const TokenTree& tree, int node, int token) {
                 const int found = tree.child(node, token);
                 return found < 0 ? std::nullopt : std::optional<int>(found);
             },
             "node"_a, "token"_a)
        .def("children", &TokenTree::children, "node"_a)
        .def("has_children", &TokenTree::has_children, "node"_a)
        .def("leaves", &TokenTree::leaves)
        .def("path", &TokenTree::path, "node"_a)
        .def("path_tokens", &TokenTree::path_tokens, "node"_a)
        .def("depth", &TokenTree::depth, "node"_a)
        .def_prop_ro("deepest", &TokenTree::deepest)
        .def("siblings_of", &TokenTree::siblings_of, "node"_a)
        .def("find",
             [](const TokenTree& tree, int64_t id) {
                 const int found = tree.find(id);
                 return found < 0 ? std::nullopt : std::optional<int>(found);
             },
             "node_id"_a)
        .def("best", &TokenTree::best, "count"_a)
        .def("best_scores", &TokenTree::best_scores, "count"_a, "leaves"_a = false)
        .def("best_width", &TokenTree::best_width, "max_leaves"_a, "fixed"_a, "per_node"_a)
        .def("chances",
             [](const TokenTree& tree, const nb::dict& factors, double other) {
                 std::vector<std::pair<int, double>> by_source;
                 for (const auto [name, value] : factors)
                     by_source.emplace_back(number_of(nb::cast<std::string>(name)), nb::cast<double>(value));
                 return tree.chances(by_source, other);
             },
             "factors"_a, "other"_a)
        .def("parent_chances",
             [](const TokenTree& tree, const std::vector<double>& chances, const std::string& source,
                int last_lookup_node, double factor, bool with_root) {
                 return tree.parent_chances(chances, number_of(source), last_lookup_node, factor, with_root);
             },
             "chances"_a, "source"_a, "last_lookup_node"_a, "factor"_a, "with_root"_a)
        .def("subtree", &TokenTree::subtree, "node"_a)
        .def("bound", &TokenTree::bound, "more"_a = std::vector<double>{})
        .def("follow", &follow, "picks"_a, "read"_a = nb::none())
        .def("take", &TokenTree::take, "other"_a, "nodes"_a)
        .def("adopt", &TokenTree::adopt, "other"_a, "first"_a, "is_secondary_visible"_a)
        .def("take_below", &TokenTree::take_below, "other"_a, "node"_a)
        .def("take_best", &TokenTree::take_best, "other"_a, "count"_a)
        .def("delta", &TokenTree::delta, "first"_a)
        .def("insert", &TokenTree::insert, "delta"_a, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<Delta>(m, "NodeDelta")
        .def(nb::new_(&to_delta), "columns"_a)
        .def("__len__", [](const Delta& delta) { return delta.ids.size(); })
        .def("columns", [](const Delta& delta) { return to_tuple(delta); })
        .def("__getitem__",
             [](const Delta& delta, int column) -> nb::object {
                 if (column < 0 || column > 4) throw nb::index_error("a delta has five columns");
                 return nb::cast(to_tuple(delta))[column];
             })
        .def("__reduce__", [](nb::handle self) {
            return nb::make_tuple(self.type(), nb::make_tuple(nb::cast(to_tuple(nb::cast<const Delta&>(self)))));
        });

    nb::class_<ProposalRows>(m, "TopKRows")
        .def(nb::new_(&to_rows), "rows"_a)
        .def("__len__", [](const ProposalRows& rows) { return rows.count; })
        .def("__getitem__", &row_at)
        // Iteration without it would end with a C++ exception: 0.1 ms where the code for it is not in the caches.
        .def("__iter__",
             [](const ProposalRows& rows) {
                 nb::list found;
                 for (int row = 0; row < rows.count; ++row) found.append(to_tuple(rows.at(row)));
                 return nb::iter(found);
             })
        .def_prop_ro("is_complete", [](const ProposalRows& rows) {
            for (int row = 0; row < rows.count; ++row)
                if (rows.at(row).tokens.empty()) return false;
            return rows.count > 0;
        });

    nb::class_<SlotMap>(m, "SlotMap")
        .def(nb::init<>())
        .def("__len__", &SlotMap::size)
        .def("__contains__", &SlotMap::contains, "node_id"_a)
        .def("__getitem__",
             [](const SlotMap& slots, int64_t id) {
                 if (!slots.contains(id)) throw nb::key_error("the node was not expanded");
                 return slots.get(id);
             })
        .def("__setitem__", &SlotMap::set)
        .def("ids", &SlotMap::ids)
        .def("clear", &SlotMap::clear)
        .def("reset", &SlotMap::reset)
        .def("peek", &SlotMap::peek, "count"_a)
        .def("expand", &SlotMap::expand, "tree"_a, "nodes"_a, "first"_a, "missing"_a)
        .def("follow", &SlotMap::follow, "accepted"_a, "tree"_a);

    nb::class_<OfferMap>(m, "OfferMap")
        .def(nb::init<>())
        .def("__len__", &OfferMap::size)
        .def("record", &OfferMap::record, "tree"_a, "nodes"_a, "rows"_a)
        .def("get",
             [](const OfferMap& offers, int64_t id) {
                 const Proposals* found = offers.get(id);
                 return found ? std::optional(to_tuple(*found)) : std::nullopt;
             })
        .def("keep", &OfferMap::keep, "slots"_a);

    nb::class_<PendingNodes>(m, "PendingNodes")
        .def(nb::init<>())
        .def("__len__", &PendingNodes::size)
        .def("add", &PendingNodes::add, "parents"_a)
        .def("mask",
             [](const PendingNodes& nodes, int first) {
                 const std::string rows = nodes.mask(first);
                 return nb::bytes(rows.data(), rows.size());
             },
             "first"_a)
        .def("depths", [](const PendingNodes& nodes, int first) {
                 return std::vector<int>(nodes.depths.begin() + std::clamp(first, 0, nodes.size()), nodes.depths.end());
             }, "first"_a = 0)
        .def("parents", [](const PendingNodes& nodes) { return nodes.parents; })
        .def("keep", &PendingNodes::keep, "live"_a);

    nb::class_<PickModel>(m, "PickModel")
        .def(nb::init<bool>(), "has_shares"_a = false)
        .def("learn",
             [](PickModel& picks, const std::vector<double>& values, std::optional<int> picked) {
                 picks.learn(values, picked.value_or(-1));
             },
             "values"_a, "picked"_a.none())
        .def("learn_written", &PickModel::learn_written, "offers"_a, "nodes"_a, "written"_a)
        .def("restore",
             [](PickModel& picks, double temperature, double coverage, double open, double coverage_weight,
                double open_weight) { picks.restore({temperature, coverage, open}, coverage_weight, open_weight); },
             "temperature"_a, "coverage"_a, "open"_a, "coverage_weight"_a, "open_weight"_a)
        .def_prop_ro("fit",
                     [](const PickModel& picks) {
                         const Calibration fit = picks.fit();
                         return std::tuple(fit.temperature, fit.coverage,
                                           fit.open < 0.0 ? std::nullopt : std::optional(fit.open));
                     })
        .def("log_chances",
             [](const PickModel& picks, const std::vector<double>& values, std::optional<int> count) {
                 return picks.log_chances(values, count.value_or(static_cast<int>(values.size())));
             },
             "values"_a, "count"_a = nb::none());

    m.def("attach_offers", &attach_offers, "trees"_a, "frontiers"_a, "offers"_a, "maps"_a, "picks"_a, "widths"_a,
          "max_children"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("choose_frontiers", &choose_frontiers, "slots"_a, "trees"_a, "counts"_a, "floors"_a, "deepest"_a,
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace outpace
