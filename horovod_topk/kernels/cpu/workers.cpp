#include "workers.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace topkef {
namespace {

/* The thread pool. Threads are detached and it is never destroyed: a process may end while they sleep. */
class Pool {
 public:
  void run(int64_t count, int threads, const std::function<void(int64_t)> &task) {
    std::unique_lock<std::mutex> lock(mutex_);
    grow(threads - 1);
    task_ = &task;
    count_ = count;
    next_.store(0);
    seats_ = std::min(threads - 1, size_);
    ++round_;
    lock.unlock();
    start_.notify_all();
    work(task, count);
    lock.lock();
    seats_ = 0;  // threads that have not woken up yet are not needed
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  /* Start threads, as many as the system allows: with fewer threads the work only takes longer. */
  void grow(int size) {
    try {
      for (; size_ < size; ++size_)
        std::thread([this, seen = round_] { wait_for_work(seen); }).detach();
    } catch (const std::system_error &) {
    }
  }

  void work(const std::function<void(int64_t)> &task, int64_t count) {
    KeepDenormals keep;
    for (int64_t i; (i = next_.fetch_add(1)) < count;) task(i);
  }

  void wait_for_work(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (seats_ == 0) continue;
      --seats_;
      ++busy_;
      auto task = task_;
      int64_t count = count_;
      lock.unlock();
      work(*task, count);
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::atomic<int64_t> next_{0};
  const std::function<void(int64_t)> *task_ = nullptr;
  int64_t count_ = 0;
  int size_ = 0, seats_ = 0, busy_ = 0;
  uint64_t round_ = 0;
};

std::atomic<Pool *> shared{nullptr};
std::atomic<bool> taken{false};

/* Threads do not survive fork(): the child gets a new pool. */
void forget_after_fork() {
  shared.store(nullptr);
  taken.store(false);
}

Pool &pool() {
  Pool *found = shared.load();
  if (!found) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
    (void)registered;
    shared.store(found = new Pool);
  }
  return *found;
}

}  // namespace

void parallel(int64_t count, int threads, const std::function<void(int64_t)> &task) {
  threads = (int)std::min<int64_t>(threads, count);
  if (threads > 1 && !taken.exchange(true)) {
    pool().run(count, threads, task);
    taken.store(false);
    return;
  }
  KeepDenormals keep;
  for (int64_t i = 0; i < count; ++i) task(i);
}

}  // namespace topkef
