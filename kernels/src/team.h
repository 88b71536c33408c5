// A few threads that share a forward's work phase by phase.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace outpace {

/// The caller's thread and `threads - 1` of its own. A phase is over when its units are done, not when all have
/// arrived: who wakes up late, or finds no core, holds up nobody and catches up. Waiting is a bounded spin, then sleep,
/// so that a team never keeps others from the cores. Which thread does what never changes a result.
class Team {
  public:
    /// One thread's way through a job.
    struct Member {
        int number;
        int phase = 0;
    };

    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    /// Members run `job`, of at most so many phases, and go through the same ones; returns when all of it is done.
    /// `job` must not throw.
    void run(int phases, const std::function<void(Member&)>& job);

    /// Within a job: f(unit) for every unit, `chunk` at a time to whoever is free; returns when all are done.
    template <class F>
    void share(Member& member, int units, int chunk, F&& f) {
        Phase& phase = phases_[member.phase++];
        for (;;) {
            const int first = phase.next.fetch_add(chunk, std::memory_order_relaxed);
            if (first >= units) break;
            const int last = first + chunk < units ? first + chunk : units;
            for (int unit = first; unit < last; ++unit) f(unit);
            if (phase.done.fetch_add(last - first, std::memory_order_acq_rel) + last - first == units && size_ > 1)
                phase.done.notify_all();
        }
        wait_until(phase.done, units);
    }

  private:
    struct alignas(64) Phase {
        std::atomic<int> next{0};  // the first unit that nobody has taken
        std::atomic<int> done{0};
    };

    static void wait_until(const std::atomic<int>& value, int expected);
    void work(int number);
    bool enter();
    void leave();

    const int size_;
    std::unique_ptr<Phase[]> phases_;
    int num_phases_ = 0;
    const std::function<void(Member&)>* job_ = nullptr;
    alignas(64) std::atomic<int> jobs_{0};    // jobs begun
    alignas(64) std::atomic<int> inside_{-1};  // members besides the caller within the open job; -1: none is open
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace outpace
