/* Threads that wait for work: one pool a process, as large as it was ever asked to be. */
#ifndef TOPKEF_WORKERS_H
#define TOPKEF_WORKERS_H

#include <cstdint>
#include <functional>

namespace topkef {

/* Call task(0) ... task(count - 1), each once, on up to `threads` threads, this one among them.
 * Returns when all are done. Where another thread is using the pool, this one works alone. */
void parallel(int64_t count, int threads, const std::function<void(int64_t)> &task);

}  // namespace topkef

#endif
