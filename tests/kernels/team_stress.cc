// Jobs of two callers on a team whose size changes; for the thread sanitizer.
#include "team.h"

#include <cstdio>
#include <vector>

int main() {
  using moe_edge::Team;
  constexpr int kJobs = 5000, kItems = 37;
  std::atomic<int> left{2};
  std::atomic<long> wrong{0};
  const auto work = [&] {
    std::vector<int> first(kItems), second(kItems);
    const int chunks[] = {kItems, 5};
    for (int job = 0; job < kJobs; ++job) {
      Team::Get().Run(chunks, [&](int phase, int chunk, int count) {
        if (phase == 0) {
          first[chunk] = job + chunk;
          return;
        }
        long from, to;  // reads what others wrote in the phase before
        moe_edge::Share(kItems, 1, chunk, count, &from, &to);
        for (long n = from; n < to; ++n) second[n] = first[kItems - 1 - n] + 1;
      });
      for (int n = 0; n < kItems; ++n) wrong += second[n] != job + kItems - n;
    }
    left.fetch_sub(1);
  };
  std::thread one(work), two(work);
  for (int size = 1; left.load() > 0; size = size % 6 + 1) {
    Team::Get().Resize(size);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  one.join();
  two.join();
  std::printf("%ld wrong\n", wrong.load());
  return wrong.load() != 0;
}
