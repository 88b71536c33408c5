// A few threads that share a forward's work phase by phase.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace outpace {

/// The caller's thread and `threads - 1` others. A phase ends when its units are done, not when all members have
/// arrived: a thread that wakes up late delays no other and catches up. Waiting is a bounded spin, then sleep, so that
/// a team does not block other processes. The assignment of units to threads does not change results.
class Team {
  public:
    /// One thread's progress through a job.
    struct Member {
        int number;
        int phase = 0;
    };

    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    /// Runs `job`, of at most `phases` phases, on all members, which go through the same phases; returns when all is
    /// done. `job` must not throw.
    void run(int phases, const std::function<void(Member&)>& job);

    /// Returns the first of the units that belong to a member.
    int first_unit(int member, int units) const { return units * member / size_; }

    /// Calls f(unit) for every unit within a job; returns when all are done. Each member takes its own range in order,
    /// because memory is read fastest in long runs (single units are a tenth to a third slower), then units of the
    /// others' ranges.
    template <class F>
    void share(Member& member, int units, F&& f) {
        const int phase = member.phase++;
        std::atomic<int>& done = counters_[phase * (size_ + 1) + size_].value;
        for (int turn = 0; turn < size_; ++turn) {
            const int owner = (member.number + turn) % size_;
            const int first = first_unit(owner, units), count = first_unit(owner + 1, units) - first;
            std::atomic<int>& taken = counters_[phase * (size_ + 1) + owner].value;
            int mine = 0;  // units of its own range that this member did
            for (int next; (next = taken.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) f(first + next);
            if (mine && done.fetch_add(mine, std::memory_order_acq_rel) + mine == units && size_ > 1) done.notify_all();
        }
        wait_until(done, units);
    }

  private:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    static void wait_until(const std::atomic<int>& value, int expected);
    void work(int number);
    bool enter();
    void leave();

    const int size_;
    std::unique_ptr<Counter[]> counters_;  // of each phase: the units taken from each member's range, and those done
    int num_counters_ = 0;
    const std::function<void(Member&)>* job_ = nullptr;
    alignas(64) std::atomic<int> jobs_{0};  // number of started jobs
    alignas(64) std::atomic<int> inside_{-1};  // other members within the open job; -1: none is open
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace outpace
