/* A pool of threads that wait for work: one for each process, which grows to the largest request. */
#ifndef TOPKEF_WORKERS_H
#define TOPKEF_WORKERS_H

#include <algorithm>
#include <cstdint>
#include <functional>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace topkef {

constexpr int64_t CHUNK = 1 << 18;  // elements of one task

/* While it exists, denormals are not flushed, whatever a framework has set for its thread. */
class KeepDenormals {
#if defined(__x86_64__)
 public:
  KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#elif defined(__aarch64__)
 public:
  KeepDenormals() : before_(get()) { set(before_ & ~(uint64_t{1} << 24)); }
  ~KeepDenormals() { set(before_); }

 private:
  static uint64_t get() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
  const uint64_t before_;
#else
 public:
  ~KeepDenormals() {}
#endif
};

/* Call task(0) ... task(count - 1), each once, on up to `threads` threads, including this one. Returns
 * when all are done. If another thread is using the pool, this one works alone. Denormals are kept. */
void parallel(int64_t count, int threads, const std::function<void(int64_t)> &task);

/* Call pass(at, n) for each chunk of `count` elements: its first element, and its number of elements. */
template <class Pass>
void in_chunks(int64_t count, int threads, Pass pass) {
  parallel((count + CHUNK - 1) / CHUNK, threads,
           [&](int64_t i) { pass(i * CHUNK, std::min(CHUNK, count - i * CHUNK)); });
}

}  // namespace topkef

#endif
