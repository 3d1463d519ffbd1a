// One team of threads for all kernels of a process.
//
// A job is a few phases, each cut into chunks that members take one by one; a phase
// begins when all chunks of the one before are done. A member begins with a run of
// chunks of its own, as memory is read faster in one stream, and then takes what is left
// of the others'. So nobody is waited for who has taken nothing: a member that wakes
// late, or whose core another process has, costs a chunk at most. Between two jobs
// members spin for a moment, giving way to whoever wants their core, and then sleep.
// While the team works for one caller, another waits.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace moe_edge {

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for a condition: a few hundred cycles hot, then giving way.
template <class Condition>
inline void SpinUntil(const Condition& condition) {
  for (int i = 0; !condition(); ++i) {
    if (i < 256) {
      Pause();
    } else {
      sched_yield();
    }
  }
}

// While one stands, this thread takes numbers too small to be exact for 0, as XLA's
// threads do: bits depend neither on who computes a chunk nor on who called.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : before_(__builtin_ia32_stmxcsr()) {
    __builtin_ia32_ldmxcsr(before_ | 0x8040);  // of results and of operands
  }
  ~FlushToZero() { __builtin_ia32_ldmxcsr(before_); }

 private:
  const unsigned before_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | 1 << 24));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// Chunk `chunk` of `chunks`: first .. last - 1 of `count` things, in whole grains.
inline void Share(long count, long grain, int chunk, int chunks, long* first,
                  long* last) {
  const long grains = (count + grain - 1) / grain;
  *first = std::min(count, grains * chunk / chunks * grain);
  *last = std::min(count, grains * (chunk + 1) / chunks * grain);
}

class Team {
 public:
  static constexpr int kMost = 256, kPhases = 4;  // members, and phases of a job

  // The process's team; a child of fork() gets its own, as it has no threads.
  static Team& Get() {
    static std::once_flag once;
    std::call_once(once, [] {
      Current().store(new Team);
      pthread_atfork(nullptr, nullptr, [] { Current().store(new Team); });
    });
    return *Current().load();
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  // Members from the next job on; 0: as many as at the start.
  void Resize(int size) {
    std::lock_guard<std::mutex> lock(busy_);
    size_.store(size > 0 ? std::min(size, kMost) : Default());
  }

  // How long members spin after a job before they sleep.
  void Spin(int microseconds) { spin_us_.store(microseconds); }

  // Chunks that a phase over so many bytes is worth.
  int Chunks(double bytes) const {
    constexpr double kLeast = 24 << 10;  // below, a hand-over costs more
    const int members = size();
    if (members == 1) return 1;
    return std::clamp(static_cast<int>(bytes / kLeast), 1, 4 * members);
  }

  // Runs phase(number, chunk, chunks) for the chunks of all phases, and returns.
  template <int N, class Phase>
  void Run(const int (&chunks)[N], const Phase& phase) {
    static_assert(N <= kPhases);
    std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
    SpinUntil([&] { return lock.try_lock(); });
    const bool is_alone = *std::max_element(chunks, chunks + N) == 1;
    const int members = is_alone ? 1 : size();
    Job<Phase> job(this, &phase, N, chunks, members);
    if (members == 1) {
      job.Work(0, false);
      return;
    }
    Start(members - 1);
    members_ = members;
    job_ = &job;
    state_.fetch_add(kJob, std::memory_order_release);  // odd: it is open
    turn_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) turn_.notify_all();
    job.Work(0, false);
    state_.fetch_add(kJob, std::memory_order_acq_rel);  // even: nobody may enter
    SpinUntil([&] { return (state_.load(std::memory_order_acquire) & kInside) == 0; });
  }

 private:
  // Starts members until there are so many, or the system refuses more: then those
  // that there are do the work.
  void Start(int count) {
    try {
      for (; started_ < count; ++started_) {
        std::thread(&Team::Member, this, started_ + 1, turn_.load()).detach();
      }
    } catch (const std::system_error&) {
    }
  }

  // Alone in its cache line.
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  struct AnyJob {
    virtual void Work(int number, bool may_leave) = 0;
  };

  template <class Phase>
  struct Job final : AnyJob {
    Job(Team* team, const Phase* phase, int count, const int* chunks, int members)
        : team(team), phase(phase), count(count), chunks(chunks), members(members) {
      for (int n = 0; n < count; ++n) {
        for (int run = 0; run < Runs(n); ++run) {
          team->next_[n][run].value.store(First(n, run), std::memory_order_relaxed);
        }
        team->done_[n].value.store(0, std::memory_order_relaxed);
      }
    }

    // Runs of a phase's chunks: one a member, none empty where there are chunks.
    int Runs(int n) const { return std::max(1, std::min(members, chunks[n])); }

    int First(int n, int run) const { return chunks[n] * run / Runs(n); }

    // Returns a chunk that nobody has taken, or -1. First of the member's own run, whose
    // memory is one stream, then of the others'; each is taken from its front only.
    int Take(int n, int number) {
      const int runs = Runs(n);
      for (int i = 0, run = number % runs; i < runs; ++i, run = (run + 1) % runs) {
        std::atomic<int>& next = team->next_[n][run].value;
        const int end = First(n, run + 1);
        if (next.load(std::memory_order_relaxed) >= end) continue;
        const int chunk = next.fetch_add(1, std::memory_order_relaxed);
        if (chunk < end) return chunk;
      }
      return -1;
    }

    // Takes chunks until none is left; `may_leave`: without waiting for the last ones.
    void Work(int number, bool may_leave) override {
      const FlushToZero flush_to_zero;
      for (int n = 0; n < count; ++n) {
        std::atomic<int>& done = team->done_[n].value;
        for (int chunk; (chunk = Take(n, number)) >= 0;) {
          (*phase)(n, chunk, chunks[n]);
          done.fetch_add(1, std::memory_order_release);
        }
        if (may_leave && n == count - 1) return;
        SpinUntil([&] { return done.load(std::memory_order_acquire) >= chunks[n]; });
      }
    }

    Team* team;
    const Phase* phase;
    const int count;
    const int* chunks;
    const int members;
  };

  Team() : size_(Default()) {}

  // What MOE_EDGE_THREADS says, else as many as cores in the affinity mask.
  static int Default() {
    if (const char* given = std::getenv("MOE_EDGE_THREADS")) {
      if (const int count = std::atoi(given); count > 0) return std::min(count, kMost);
    }
    return std::min(Cores(), kMost);
  }

  static std::atomic<Team*>& Current() {
    static std::atomic<Team*> current{nullptr};
    return current;
  }

  static int Cores() {
#if defined(__linux__)
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) return CPU_COUNT(&mask);
#endif
    return std::max(1u, std::thread::hardware_concurrency());
  }

  void Member(int number, int seen) {
    using Clock = std::chrono::steady_clock;
    for (;;) {
      const std::chrono::microseconds spin(spin_us_.load(std::memory_order_relaxed));
      const auto spin_until = Clock::now() + spin;
      for (int i = 0; turn_.load(std::memory_order_acquire) == seen; ++i) {
        if (i % 64 != 63) {
          Pause();
        } else if (Clock::now() < spin_until) {
          sched_yield();
        } else {
          sleeping_.fetch_add(1, std::memory_order_seq_cst);
          turn_.wait(seen, std::memory_order_seq_cst);
          sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        }
      }
      seen = turn_.load(std::memory_order_acquire);
      // Enters while the job is open: then it stands until this member has left.
      uint64_t state = state_.load(std::memory_order_acquire);
      while ((state & kJob) != 0 &&
             !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
      }
      if ((state & kJob) == 0) continue;
      if (number < members_) job_->Work(number, true);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr uint64_t kJob = 1 << 16, kInside = kJob - 1;
  std::mutex busy_;
  std::atomic<int> size_;
  int started_ = 0, members_ = 0;
  AnyJob* job_ = nullptr;
  Counter next_[kPhases][kMost];  // chunk of each phase and run
  Counter done_[kPhases];         // chunks of each phase
  std::atomic<uint64_t> state_{0};  // jobs opened and closed, and members inside
  std::atomic<int> turn_{0}, sleeping_{0}, spin_us_{200};
};

}  // namespace moe_edge
