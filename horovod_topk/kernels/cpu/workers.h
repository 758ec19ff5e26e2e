/* A pool of threads that wait for work: one for each process, which grows to the largest request. */
#ifndef TOPKEF_WORKERS_H
#define TOPKEF_WORKERS_H

#include <cstdint>
#include <functional>

namespace topkef {

/* Call task(0) ... task(count - 1), each once, on up to `threads` threads, including this one. Returns
 * when all are done. If another thread is using the pool, this one works alone. */
void parallel(int64_t count, int threads, const std::function<void(int64_t)> &task);

}  // namespace topkef

#endif
