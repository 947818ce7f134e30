// Work shared with the threads of XLA's pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace osd {

namespace ffi = xla::ffi;

constexpr int64_t kShare = 128 * 1024;  // bytes to read that are worth a thread

// Runs `work(begin, end)` over all rows on the calling thread and the threads of XLA's
// pool. A free thread takes the next part, so a busy pool delays nothing.
inline void Share(ffi::ThreadPool& pool, int64_t rows, int64_t row_bytes,
           std::function<void(int64_t, int64_t)> work) {
  const int64_t threads =
      std::min<int64_t>(pool.num_threads(), rows * row_bytes / kShare);
  if (threads <= 1) return work(0, rows);
  struct Parts {
    std::function<void(int64_t, int64_t)> work;
    int64_t rows, size, count;
    std::atomic<int64_t> taken{0}, done{0};
    void Run() {
      for (int64_t part = taken++; part < count; part = taken++) {
        work(part * size, std::min(rows, (part + 1) * size));
        ++done;
      }
    }
  };
  auto parts = std::make_shared<Parts>();
  parts->work = std::move(work);
  parts->rows = rows;
  parts->size = rows / (2 * threads) + 1;
  parts->count = (rows + parts->size - 1) / parts->size;
  for (int64_t i = 1; i < threads; ++i) {
    pool.Schedule([parts] { parts->Run(); });
  }
  parts->Run();
  while (parts->done < parts->count) std::this_thread::yield();
}

}  // namespace osd
