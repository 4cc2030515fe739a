#include "engine/engine.h"

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

namespace tensorferry {

const std::vector<EngineKind>& engine_kinds() {
  static const std::vector<EngineKind> kinds{{"io_uring", create_io_uring_engine},
                                             {"libaio", create_libaio_engine},
                                             {"threads", create_threads_engine},
                                             {"cufile", create_cufile_engine, true}};
  return kinds;
}

int64_t execute_now(const Block& block) {
  if (block.call != nullptr) return block.call(block);
  ssize_t result = -1;
  switch (block.operation) {
    case Operation::read:
      result = ::pread(block.descriptor, block.memory, block.nbytes, static_cast<off_t>(block.offset));
      break;
    case Operation::write:
      result = ::pwrite(block.descriptor, block.memory, block.nbytes, static_cast<off_t>(block.offset));
      break;
  }
  return result < 0 ? -errno : result;
}

int64_t read_cached(const Block& block) {
  const struct iovec place{block.memory, block.nbytes};
  // RWF_NOWAIT (preadv2(2)) reads only what the page cache holds, and fails with EAGAIN where it would have to wait.
  const ssize_t result = ::preadv2(block.descriptor, &place, 1, static_cast<off_t>(block.offset), RWF_NOWAIT);
  return result >= 0 ? result : -errno_of_cached();
}

int errno_of_cached() {
  // These are the errors of kernels and file systems that do not support RWF_NOWAIT. For the caller this is the same as
  // data that is not cached.
  const bool refused = errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL;
  return refused ? EAGAIN : errno;
}

}  // namespace tensorferry
